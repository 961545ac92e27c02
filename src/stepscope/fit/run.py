"""Run a fit: on a GPU or on the host, from the cache or with probes."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import datetime

from stepscope.errors import TrialError
from stepscope.fit import cache
from stepscope.fit.gpu_search import search_gpu
from stepscope.fit.host_search import search_host
from stepscope.fit.linear2019 import fit_2019
from stepscope.fit.memory_budget import budget_for, choose_gpu, loader_memory
from stepscope.fit.probes.client import ForkedProbes
from stepscope.fit.probes.host import TrialProbes
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import ChosenGpu, FitResult, MemoryBudget
from stepscope.fit.search import build_result
from stepscope.workloads.frameworks.registry import framework_name


def run_fit(request: FitRequest, listener: FitListener = FitListener()) -> FitResult:  # noqa: B008
    request.check()
    gpu = None
    if request.workload.device != "cpu":
        gpu = choose_gpu(request.limits.gpus, os.environ, request.workload.ranks)
    if gpu is None:
        for notice in request.check_without_gpu():
            listener.notify(notice)
    key = cache.key_of(request, gpu)
    cached = None if request.no_cache or request.verify else cache.load(key)
    if cached is not None and gpu is not None:
        now = replace(cached.budget, free_bytes=gpu.free_bytes, other_processes=gpu.other_processes)
        return replace(cached, budget=now)
    if cached is not None:
        return cached
    start = time.monotonic()
    budget = budget_for(request, gpu)
    if gpu is None:
        fit = fit_on_host(request, budget, listener)
    else:
        fit = fit_on_gpu(request, gpu, budget, listener)
    fit = replace(
        fit,
        cost=replace(fit.cost, seconds=time.monotonic() - start),
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        gpu=gpu,
    )
    cache.store(key, fit)
    return fit


def fit_on_host(request: FitRequest, budget: MemoryBudget, listener: FitListener) -> FitResult:
    request = replace(request, workload=replace(request.workload, device="cpu"))
    limits = replace(request.limits, memory=budget.limit_bytes)
    with TrialProbes(request.workload, limits, listener.notify, listener.show) as probes:
        return build_result(search_host(probes, budget, request, listener), request)


def fit_on_gpu(
    request: FitRequest, gpu: ChosenGpu, budget: MemoryBudget, listener: FitListener
) -> FitResult:
    workload = request.workload
    listener.show(f"building {workload.short_name}")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid}
    with ForkedProbes(workload, environment, request.limits.stall_timeout_s) as probes:
        if not probes.subject.on_gpu:
            raise TrialError(
                f"The installed {framework_name(workload.framework)} cannot use the GPU {gpu.name}",
                "Install a build for this GPU, or pass --device cpu",
            )
        probes.subject = replace(probes.subject, device_name=gpu.name)
        if request.method == "linear2019":
            return fit_2019(probes, budget, request, listener)
        found = search_gpu(probes, budget, request, listener)
        loader = loader_memory(workload, probes.subject.sample_bytes, request.limits.memory)
        return build_result(found, request, loader)
