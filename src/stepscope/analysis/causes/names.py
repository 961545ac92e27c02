"""The causes that can be named, each with a title; docs and checks read this one table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """What can hold a training back, or how it should be."""

    key: str
    title: str
    meaning: str
    healthy: bool = False


CAUSES: dict[str, Cause] = {
    cause.key: cause
    for cause in (
        Cause("input.workers", "too few loader workers",
              "Batches are prepared too late although cores are idle."),
        Cause("input.preparation", "preparing samples takes too much CPU",
              "The workers have all cores busy, and the training still waits for them."),
        Cause("input.fetch", "fetching samples from storage or network",
              "Whoever prepares batches stands still, waiting for bytes."),
        Cause("input.collation", "putting batches together",
              "`collate_fn` takes longer than the samples themselves."),
        Cause("input.handover", "handing batches over",
              "Workers are idle, and the training waits: pickling, shared memory, pinning."),
        Cause("input.startup", "starting loader workers again and again",
              "Workers are started anew for every epoch, and the training waits for them."),
        Cause("cpu.quota", "a CPU quota holds threads back",
              "The control group's quota stops threads that have work."),
        Cause("cpu.cores", "too few CPU cores",
              "The run may use fewer cores than the machine has, and has all of them busy."),
        Cause("cpu.threads", "threads fight for the cores",
              "Many more threads want to run than there are cores."),
        Cause("cpu.serial", "computing on some of the cores only",
              "The model is computed on the CPU, by fewer threads than there are cores."),
        Cause("transfer", "copying batches to the GPU",
              "The GPU waits while batches are copied to it."),
        Cause("launch", "launching kernels",
              "The GPU is done with kernels sooner than Python can launch the next."),
        Cause("sync", "waiting for the GPU in every step",
              "`.item()` and the like make the host wait, and then the GPU for the host."),
        Cause("sync.logging", "logging in every step",
              "The training thread formats and writes logs while nothing is computed."),
        Cause("batch.small", "the batch is too small",
              "What a step costs at any size outweighs what its samples cost."),
        Cause("gpu.precision", "tensor cores are idle",
              "Matrix products run in float32 on the ordinary units."),
        Cause("gpu.underfilled", "the GPU is not filled",
              "Kernels run all the time, on a part of the multiprocessors."),
        Cause("gpu.compute", "the GPU computes", "It is as busy as it can be.", healthy=True),
        Cause("gpu.bandwidth", "the GPU moves memory",
              "Its memory bandwidth is the limit.", healthy=True),
        Cause("cpu.compute", "the CPU computes", "All cores compute the model.", healthy=True),
        Cause("ranks.straggler", "one rank is slower than the others",
              "All ranks wait in every step for the slowest."),
        Cause("ranks.communication", "communication between ranks",
              "Steps are spent exchanging gradients."),
        Cause("outside.checkpoint", "saving checkpoints", "Training stands still while it saves."),
        Cause("outside.evaluation", "evaluation", "Much of the time goes to evaluation."),
        Cause("outside.other", "work between steps", "Some steps take far longer than the others."),
        Cause("memory.gpu", "GPU memory is at its edge",
              "The allocator has to give memory back and ask again, or hardly any is left."),
        Cause("memory.host", "host memory is at its edge",
              "Swapping, reclaiming, or close to the limit."),
        Cause("memory.shm", "shared memory is at its edge", "/dev/shm is nearly full."),
        Cause("leak.host", "host memory grows without end", "It will reach the limit."),
        Cause("leak.gpu", "GPU memory grows without end", "It will reach the limit."),
        Cause("drift.steps", "steps get slower and slower", "Each step does more than the last."),
        Cause("throttle.power", "the power limit holds the clocks down",
              "The GPU would run faster if it were allowed more power."),
        Cause("throttle.heat", "heat holds the clocks down", "The GPU is too hot."),
        Cause("interference.cpu", "others use the CPUs",
              "Processes outside of the run take the cores that it wants."),
        Cause("interference.gpu", "others use the GPU",
              "Processes outside of the run compute on the same GPU."),
        Cause("io.bound", "storage or network", "Judged by resources alone."),
        Cause("gpu.idle", "the GPU is idle", "Judged by resources alone."),
        Cause("short", "too short to tell", "There are too few steps to judge."),
        Cause("unclear", "nothing stands out", "No part is near its limit for long."),
    )
}  # fmt: skip
