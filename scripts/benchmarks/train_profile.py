"""The kernels of one step by group and by name, what launched them by shape, and how long the device is idle."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .common import synchronize
from .train_contenders import Contender


TOP = 30  # of each list
# The first that matches names a kernel's group: names share words, such as CUTLASS in products and in attention.
GROUPS = {
    "attention": r"flash|fmha|sdpa|attention|_merge_kernel|_backward_kernel|_forward_kernel|_key_value_kernel|"
    r"_query_kernel|_query_bounds_kernel",
    "loss rows": r"_teacher_kernel|_cross_entropy_kernel|_scale_kernel|log_softmax_\w+_kernel|cunn_Soft",
    "optimizer": r"adam|multi_tensor",
    "gemm": r"gemm|nvjet|cutlass|xmma|cublas|splitk|grouped",
    "copies and indexing": r"^(?!triton_).*(memcpy|memset|copy|index|gather|scatter|CatArray|fill|embedding|arange|"
    r"searchsorted|bucketize|scan|sort|select|roll|unique|where)",
    "norms and pointwise": r"norm|GammaBeta|triton_|elementwise|reduce|vectorized",
}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm")


def group_of(kernel: str) -> str:
    matches = (group for group, pattern in GROUPS.items() if re.search(pattern, kernel, re.IGNORECASE))
    return next(matches, "other")


def print_profile(title: str, contender: Contender, device: torch.device) -> None:
    for _ in range(2):
        contender.run()
    wall_ms = _wall_ms(contender.run, device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as recorded:
        contender.run()
        synchronize(device)
    events = recorded.key_averages(group_by_input_shape=True)
    kernels = _kernels(events, on_device=device.type == "cuda")
    busy_ms = sum(total for _, total in kernels.values())
    count = sum(number for number, _ in kernels.values())
    print(f"\n{title}: {wall_ms:.1f} ms, {busy_ms:.1f} ms of it in {count} kernels, idle {wall_ms - busy_ms:.1f} ms")
    if type(contender).loss is not Contender.loss:
        contender.release()
        print(f"  forward alone {_wall_ms(contender.loss, device):.1f} ms")
    _print_groups(kernels, busy_ms)
    _print_kernels(kernels)
    _print_operators(events, on_device=device.type == "cuda")
    _print_products(events, on_device=device.type == "cuda")


def _wall_ms(call: Callable[[], Any], device: torch.device, repeats: int = 3) -> float:
    """Unprofiled, one behind the other."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return 1000 * (time.perf_counter() - started) / repeats


def _kernels(events: Iterable[Any], on_device: bool) -> dict[str, tuple[int, float]]:
    """Launches and ms of each kernel; without a device, of each operator."""
    kernels: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in events:
        if (event.device_type == DeviceType.CUDA) != on_device or event.is_user_annotation:
            continue
        own_us = event.self_device_time_total if on_device else event.self_cpu_time_total
        number, total = kernels[event.key]
        kernels[event.key] = (number + event.count, total + own_us / 1000)
    return kernels


def _print_groups(kernels: dict[str, tuple[int, float]], busy_ms: float) -> None:
    groups: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for kernel, (number, total) in kernels.items():
        count, ms = groups[group_of(kernel)]
        groups[group_of(kernel)] = (count + number, ms + total)
    for group, (number, total) in sorted(groups.items(), key=lambda item: -item[1][1]):
        print(f"  {group:22}{total:10.2f} ms {100 * total / max(busy_ms, 1e-9):5.1f}% {number:6} launches")


def _print_kernels(kernels: dict[str, tuple[int, float]]) -> None:
    print("  top kernels:        ms      count    mean us")
    for kernel, (number, total) in sorted(kernels.items(), key=lambda item: -item[1][1])[:TOP]:
        name = re.sub(r"\s+", " ", kernel)[:110]
        print(f"  {group_of(kernel)[:12]:12}{total:10.2f} {number:10} {1000 * total / number:10.1f}  {name}")


def _print_operators(events: Iterable[Any], on_device: bool) -> None:
    """Whose kernels are not products: what to fuse or leave out."""
    print("  other operators:    ms      count    shapes")
    own_us = {
        id(event): event.self_device_time_total if on_device else event.self_cpu_time_total
        for event in events
        if event.device_type == DeviceType.CPU and event.key not in PRODUCTS
    }
    operators = [event for event in events if own_us.get(id(event))]
    for event in sorted(operators, key=lambda event: -own_us[id(event)])[:TOP]:
        shapes = " ".join(str(shape) for shape in event.input_shapes if shape)[:70]
        print(f"  {event.key[:34]:34} {own_us[id(event)] / 1000:9.2f} {event.count:8}  {shapes}")


def _print_products(events: Iterable[Any], on_device: bool) -> None:
    """Each shape's share and speed; a batched or grouped product's flops are not counted."""
    print("  products:           ms      count   TFLOP/s")
    products = [event for event in events if event.key in PRODUCTS and event.device_type == DeviceType.CPU]
    times = {id(event): event.device_time_total if on_device else event.cpu_time_total for event in products}
    for event in sorted(products, key=lambda event: -times[id(event)])[:TOP]:
        ms = times[id(event)] / 1000
        matrices = [shape for shape in event.input_shapes if len(shape) == 2][-2:]
        speed = "-"
        if event.key in ("aten::mm", "aten::addmm") and len(matrices) == 2 and ms:
            (rows, inner), (_, columns) = matrices
            speed = f"{2e-9 * rows * inner * columns * event.count / ms:.0f}"
        shapes = " x ".join(map(str, matrices or event.input_shapes))
        print(f"  {event.key[6:]:12}{ms:10.2f} {event.count:10} {speed:>10}  {shapes}")
