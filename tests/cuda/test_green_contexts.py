"""Shares of a GPU from a fake driver: sizes, disjointness, one split call, no leaks, and the fallbacks."""

import logging
from ctypes.util import find_library
from typing import Any

import pytest

from faser_backend.cuda.green_contexts import DEFAULT_STREAM_FLAG, NON_BLOCKING, DriverError, GreenSplits, call_driver
from faser_backend.cuda.streams import SmMenu, open_menu
from faser_backend.device.partition import split_name
from tests.support.fake_cuda import FakeCuda, FakeDriver, Status

ONCE = ("cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount")
PER_SHARE = ("cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxGetDevResource", "cuGreenCtxStreamCreate")
# Of the shares of drafts: those of targets fall back.
CALLS = [*((name, 1) for name in ONCE), *((name, number) for name in PER_SHARE for number in (1, 3, 5, 7))]


def names_of(green: GreenSplits) -> list[str]:
    return [f"{draft.num_sms}/{target.num_sms}" for draft, target in green.splits]


def open_faked(driver: FakeDriver, cuda: FakeCuda | None = None) -> SmMenu:
    return open_menu(cuda or FakeCuda(len(driver.device.sms)), 0, lambda: driver)


@pytest.mark.parametrize(
    ("num_sms", "smallest", "expected"),
    [
        (132, 8, ["8/124", "16/116", "32/100", "64/68"]),
        (78, 8, ["8/70", "16/62", "32/46"]),
        (14, 8, ["6/8"]),
        (14, 4, ["4/10"]),
        (14, 2, ["2/12", "4/10"]),
        (108, 4, ["4/104", "8/100", "16/92", "32/76"]),
        (16, 8, ["8/8"]),
        (26, 8, ["8/18"]),
    ],
)
def test_splits_use_every_sm_once(num_sms: int, smallest: int, expected: list[str]) -> None:
    driver = FakeDriver(num_sms, smallest)
    green = GreenSplits(driver, 0)
    assert names_of(green) == expected and green.note == "" and green.num_sms == num_sms
    for draft, target in green.splits:
        shares = driver.sms_of[draft.stream], driver.sms_of[target.stream]
        assert not shares[0] & shares[1] and shares[0] | shares[1] == set(range(num_sms))
        assert [len(share) for share in shares] == [draft.num_sms, target.num_sms]
    assert driver.calls["cuDevSmResourceSplitByCount"] == 1
    green.close()
    green.close()
    assert not driver.contexts and not driver.streams


def test_sms_that_cannot_be_joined_are_left_out_and_told() -> None:
    driver = FakeDriver(132, 8, joins_rest=False)
    green = GreenSplits(driver, 0)
    assert names_of(green) == ["8/120", "16/112", "32/96", "64/64"]
    assert green.note.startswith("4 SMs belong to no share (cuDev") and "INVALID_RESOURCE_CONFIGURATION)" in green.note
    green.close()
    assert not driver.contexts and not driver.streams


@pytest.mark.parametrize("status", [Status.CUDA_ERROR_OUT_OF_MEMORY, Status.CUDA_ERROR_NOT_SUPPORTED])
@pytest.mark.parametrize("name", PER_SHARE)
def test_any_error_of_joining_them_leaves_them_out_with_its_reason(name: str, status: Status) -> None:
    driver = FakeDriver(132, 8, fails_at=(name, 2), status=status)  # the first target's
    green = GreenSplits(driver, 0)
    assert names_of(green) == ["8/120", "16/116", "32/100", "64/68"]
    assert green.note == f"4 SMs belong to no share ({name}: {status.name})"
    assert len(driver.contexts) == len(driver.streams) == 8, "nothing is left of the failed share"
    green.close()
    assert not driver.contexts and not driver.streams


def test_fewer_groups_than_division_promises_are_what_is_used() -> None:
    """Clusters and alignment can cost groups: the number that the driver returns counts."""
    green = GreenSplits(FakeDriver(132, 8, most_groups=5), 0)
    assert names_of(green) == ["8/124", "16/116"]


@pytest.mark.parametrize("fails_at", CALLS, ids=lambda call: f"{call[0]}-{call[1]}")
def test_a_failure_at_any_call_leaves_nothing_open(fails_at: tuple[str, int]) -> None:
    driver = FakeDriver(fails_at=fails_at)
    with pytest.raises(DriverError, match=f"{fails_at[0]}: CUDA_ERROR_OUT_OF_MEMORY"):
        GreenSplits(driver, 0)
    assert not driver.contexts and not driver.streams
    menu = open_faked(FakeDriver(fails_at=fails_at)).menu
    assert not menu.splits and fails_at[0] in menu.note


def test_a_failure_to_destroy_one_share_still_destroys_the_others() -> None:
    driver = FakeDriver(fails_at=("cuStreamDestroy", 2), status=Status.CUDA_ERROR_INVALID_CONTEXT)
    green = GreenSplits(driver, 0)
    driver.cuGreenCtxDestroy = lambda context: (driver.contexts.pop(context), (Status.CUDA_SUCCESS,))[1]  # type: ignore[method-assign]
    with pytest.raises(DriverError, match="cuStreamDestroy"):
        green.close()
    assert not driver.contexts and len(driver.streams) == 1


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (FakeDriver(version=12020), "CUDA driver 12020: green contexts need at least 12040"),
        (FakeDriver(8, 8), "8 SMs: two shares need more than 8"),
        (FakeDriver(6, 8), "6 SMs: two shares need more than 8"),
        (FakeDriver(132, 0), "both need CUDA 13"),
        (FakeDriver(132, 8, most_groups=0), "split into 0 group"),
        (FakeDriver(fails_at=("cuGreenCtxCreate", 1), status=Status.CUDA_ERROR_NOT_SUPPORTED), "NOT_SUPPORTED"),
    ],
)
def test_a_device_that_cannot_split_says_why(driver: FakeDriver, reason: str) -> None:
    with pytest.raises(DriverError, match=reason):
        GreenSplits(driver, 0)
    assert not driver.contexts and not driver.streams


def test_functions_that_are_missing_are_named() -> None:
    class Old:
        def cuInit(self, flags: int):
            raise RuntimeError("libcuda.so.1 cannot be opened")

        def cuGreenCtxDestroy(self, context: int):
            raise RuntimeError('Function "cuGreenCtxDestroy" not found')

    with pytest.raises(DriverError, match=r"^no NVIDIA driver \(libcuda"):
        call_driver(Old(), "cuInit", 0)
    with pytest.raises(DriverError, match='cuGreenCtxDestroy: Function "cuGreenCtxDestroy" not found'):
        call_driver(Old(), "cuGreenCtxDestroy", 0)
    with pytest.raises(DriverError, match=r"cuGreenCtxCreate: missing in this cuda-python"):
        call_driver(Old(), "cuGreenCtxCreate", 0)


class TestChoice:
    def test_green_contexts_come_first(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        driver = FakeDriver(132, 8)
        menu = open_faked(driver)
        assert [split_name(*split) for split in menu.menu.splits] == ["8/124", "16/116", "32/100", "64/68"]
        assert menu.menu.whole.size == 132 and menu.menu.whole.stream.cuda_stream not in (0, *driver.streams)
        assert {share.stream.cuda_stream for split in menu.menu.splits for share in split} == set(driver.streams)
        assert "GPU partitions: 132 SMs: in turn on all, or green contexts 8/124" in caplog.text
        menu.close()
        assert not driver.contexts

    def test_without_them_every_step_is_serial(self, caplog: pytest.LogCaptureFixture) -> None:
        menu = open_faked(FakeDriver(version=12000))
        assert not menu.menu.splits and "CUDA driver 12000" in menu.menu.note
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        menu.close()

    def test_without_cuda_python_the_reason_is_its_absence(self) -> None:
        def missing() -> Any:
            raise ImportError("No module named 'cuda'")

        menu = open_menu(FakeCuda(), 0, missing).menu
        assert not menu.splits and "No module named 'cuda'" in menu.note


def test_a_share_binds_threads_and_lends_itself() -> None:
    cuda = FakeCuda()
    menu = open_faked(FakeDriver(), cuda=cuda).menu
    draft = menu.splits[0][0]
    menu.whole.bind_current_thread()
    cuda.touch("pool")
    with draft.current():
        assert cuda.current_stream() is draft.stream
        cuda.touch("pool")
        with draft.current():
            cuda.touch("pool")
    assert cuda.current_stream() is menu.whole.stream
    cuda.touch("pool")
    cuda.check_order()

    def fails() -> None:
        with draft.current():
            cuda.touch("pool")
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fails()
    assert cuda.current_stream() is menu.whole.stream
    cuda.touch("pool")
    cuda.check_order()


def sm_kind(driver: Any) -> Any:
    return driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM


@pytest.mark.parametrize(
    ("name", "make_arguments"),
    [
        ("cuInit", lambda driver: (0,)),
        ("cuDeviceGet", lambda driver: (0,)),
        ("cuDeviceGetDevResource", lambda driver: (driver.CUdevice(0), sm_kind(driver))),
        ("cuDevSmResourceSplitByCount", lambda driver: (16, driver.CUdevResource(), 0, 8)),
        ("cuDevResourceGenerateDesc", lambda driver: ([driver.CUdevResource()] * 2, 2)),
        ("cuGreenCtxCreate", lambda driver: (driver.CUdevResourceDesc(), driver.CUdevice(0), DEFAULT_STREAM_FLAG)),
        ("cuGreenCtxGetDevResource", lambda driver: (driver.CUgreenCtx(), sm_kind(driver))),
        ("cuGreenCtxStreamCreate", lambda driver: (driver.CUgreenCtx(), NON_BLOCKING, 0)),
    ],
)
def test_the_real_bindings_take_what_they_are_given(name: str, make_arguments: Any) -> None:
    """Without a driver they convert their arguments first, then report that there is none."""
    driver = pytest.importorskip("cuda.bindings.driver")
    if find_library("cuda") is not None:
        pytest.skip("there is a driver, which would act on it: gpu_check.py does")
    with pytest.raises(DriverError):  # not TypeError
        call_driver(driver, name, *make_arguments(driver))
