"""A streaming client of Triton's gRPC: `python examples/grpc_stream.py [ADDRESS]`, with `faser serve` running."""

import contextlib
import queue
import sys

import numpy as np
import tritonclient.grpc as triton

REQUEST = {
    "text_input": ("BYTES", np.array([["def read_lines(path):\n"]], dtype=object)),
    "max_tokens": ("INT32", np.array([[40]], np.int32)),
    "stream": ("BOOL", np.array([[True]])),
}


def tensors() -> list[triton.InferInput]:
    made = []
    for name, (kind, value) in REQUEST.items():
        made.append(triton.InferInput(name, list(value.shape), kind))
        made[-1].set_data_from_numpy(value)
    return made


if __name__ == "__main__":
    answers: queue.Queue = queue.Queue()
    with triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "localhost:8001") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        with contextlib.suppress(triton.InferenceServerException):  # no server: the stream's error has the reason
            client.async_stream_infer("ensemble", tensors(), enable_empty_final_response=True)
        is_final = False
        while not is_final:
            result, error = answers.get(timeout=60)
            if error is not None:
                sys.exit(f"error: {error}")
            if (text := result.as_numpy("text_output")) is not None:
                print(text.reshape(-1)[0].decode(), end="", flush=True)
            is_final = result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    print()
