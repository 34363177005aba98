"""The OpenAI-compatible door: an ASGI application that answers from Triton's token model over gRPC.

`app.py` is where requests enter; `fields.py` says what they may ask for, `sampling.py` what that means to the engine,
`triton_client.py` fetches tokens, `answer.py` makes text of them, `replies.py` and `responses.py` the API's objects.
"""
