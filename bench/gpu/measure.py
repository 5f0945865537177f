# SPDX-License-Identifier: MIT
"""Times of calls on the stream, in microseconds."""
import time

import torch

CALLS, PAUSE = 25, 0.01  # seconds
SUSTAINED = 0.4  # seconds
QUEUED = 500_000  # cycles of work before each call, so that no host is too slow to have it queued in time

_flush = None


def time_us(call):
    global _flush
    if _flush is None:
        _flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    call(), call()
    times = []
    for i in range(CALLS):
        torch.cuda.synchronize()
        time.sleep(PAUSE)
        _flush.fill_(i)
        torch.cuda._sleep(QUEUED)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(), call(), end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[CALLS // 2]


def sustained_us(call):
    """Back to back, two calls a measurement, so that events cost the stream little."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times, begin = [], time.monotonic()
    while time.monotonic() - begin < SUSTAINED or len(times) < 5:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(), call(), call(), end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 2)
    return sorted(times)[len(times) // 2]


def gemm_tflops():
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    return 2 * 8192**3 / time_us(lambda: a @ b) * 1e-6
