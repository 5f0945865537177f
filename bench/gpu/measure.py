# SPDX-License-Identifier: MIT
"""Times of calls on the stream, in microseconds."""
import time

import torch

CALLS, PAUSE = 25, 0.01  # seconds
SUSTAINED = 0.4  # seconds
PATIENCE = 2.0  # seconds, with a peer's call
QUEUED = 2_000_000  # cycles of work before each call, so that no host is too slow to have it queued in time

_flush = None


def time_us(call, calls=CALLS, seconds=1.0):
    """Median of cold calls. A slow one is called less often than `calls`: for so many seconds, three times at least."""
    global _flush
    if _flush is None:
        _flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    call(), call()
    times, begin = [], time.monotonic()
    while len(times) < calls and (len(times) < 3 or time.monotonic() - begin < seconds):
        torch.cuda.synchronize()
        time.sleep(PAUSE)
        _flush.fill_(len(times))
        torch.cuda._sleep(QUEUED)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(), call(), end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def peer_us(call, calls=9, seconds=0.3):
    """The same of a peer. One that takes longer than PATIENCE, and not only the first time, is no peer to wait for."""
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.monotonic()
        call()
        torch.cuda.synchronize()
        took = time.monotonic() - begin
        if took < PATIENCE:
            return time_us(call, calls, seconds)
    raise TimeoutError(f"a call takes {took:.1f} s")


def sustained_us(call):
    """Back to back, two calls a measurement, so that events cost the stream little."""
    call()
    torch.cuda.synchronize()
    times, begin = [], time.monotonic()
    while time.monotonic() - begin < SUSTAINED or not times:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(), call(), call(), end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 2)
    return sorted(times)[len(times) // 2]


def gemm_tflops():
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    return 2 * 8192**3 / time_us(lambda: a @ b, calls=9) * 1e-6


def empty_us():
    """An empty kernel: what a launch and its two events take."""
    return time_us(lambda: torch.cuda._sleep(0))
