"""Texts of recommendations: one entry for each action, for scripts and for trials."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ActionText:
    """A change to a script or its environment, the option of a trial with the same effect, and the
    reason.

    Templates as in `messages`; `{value}` is the new value of the setting.
    """

    change: str
    reason: str = ""
    option: str = ""  # of `stepscope trial`, if it has one


def _workers(reason: str = "") -> ActionText:
    return ActionText("Set num_workers={value}", reason, "--workers {value}")


def _batch(reason: str) -> ActionText:
    return ActionText("Set batch_size={value}", reason, "--batch-size {value}")


def _bf16(device: str, reason: str) -> ActionText:
    autocast = f"torch.autocast('{device}', dtype=torch.bfloat16)"
    change = f"Run the forward pass and the loss under {autocast}"
    return ActionText(change, reason, "--precision {value}")


def _compile(reason: str, arguments: str = "model") -> ActionText:
    return ActionText(f"Use model = torch.compile({arguments})", reason, "--compile")


_FILL_GPU = (
    "Up to {times}× as many samples in the same step time, and possibly more until the GPU is "
    "full. Check the learning rate, and that the batch fits in memory."
)
_SMALLER_BATCH = "With a slightly smaller batch, the allocator does not need to free its cache."
_FIND_GROWING_STATE = (
    "Find state that grows with every step and is processed again in each one: a list of losses, a "
    "statistic over all steps, a graph that is never freed"
)

# fmt: off
ACTIONS: dict[str, ActionText] = {
    # Data loading
    "enough_workers": _workers(
        "Preparing a batch takes {batch_preparation:time}, and training needs one every "
        "{step_without_wait:time}."),
    "more_workers": _workers(),
    "more_reads_at_once": _workers(
        "More concurrent reads help if latency is the limit, but not if bandwidth is."),
    "cheaper_transform": ActionText(
        "Make the transform cheaper: vectorize it, decode at the needed size, or move it to the "
        "GPU",
        "Preparing a batch takes {batch_cpu:time} of CPU time, and training needs one every "
        "{step_without_wait:time}."),
    "prepare_data_once": ActionText(
        "Preprocess the dataset once and store the result", "Every epoch repeats the same work."),
    "copy_data_locally": ActionText(
        "Copy the dataset to a local disk or into memory before training",
        "The data arrives at {rate:bytes}/s."),
    "larger_files": ActionText(
        "Store the samples in larger files (tar shards, Parquet, LMDB)",
        "Every small read pays the full latency."),
    "vectorize_collation": ActionText(
        "Use a collate_fn that allocates once and copies (torch.stack(samples, out=…), "
        "pad_sequence)",
        "Python loops over elements are slow."),
    "prefetch_more": ActionText(
        "Set prefetch_factor={value}", "Each worker then prepares more batches in advance.",
        "--prefetch {value}"),
    "fewer_tensors": ActionText(
        "Return one tensor per field from the dataset instead of many small ones",
        "Each tensor is transferred as a separate file descriptor."),
    "keep_workers": ActionText(
        "Set persistent_workers=True", "The workers then keep running between epochs.",
        "--persistent"),
    # CPU cores
    "find_processes": ActionText(
        "Stop the other processes, or move them or this run to another machine",
        "List them with `ps -eo pid,pcpu,user,args --sort=-pcpu | head`."),
    "exclusive_cores": ActionText(
        "Request exclusive cores: --exclusive (Slurm), docker --cpuset-cpus with separate cores "
        "for each container",
        "Setting your own affinity does not keep other processes off these cores."),
    "raise_quota": ActionText(
        "Raise the CPU quota of the container (docker --cpus, resources.limits.cpu in Kubernetes)",
        "It allows {allowed:g} of {machine:cores}."),
    "limit_worker_threads": ActionText(
        "Call torch.set_num_threads({value}) in worker_init_fn",
        "Each loader worker then uses {value:threads}."),
    "limit_process_threads": ActionText(
        "Call torch.set_num_threads({value}) at the start of each process",
        "Each process then uses {value:threads}."),
    "limit_library_threads": ActionText(
        "Set OMP_NUM_THREADS={value} and MKL_NUM_THREADS={value}",
        "This also limits NumPy, OpenCV and other libraries with their own thread pools."),
    "more_threads": ActionText(
        "Call torch.set_num_threads({value}), or unset OMP_NUM_THREADS",
        "The model is then computed on all allowed cores."),
    "more_cores": ActionText(
        "Request more CPUs: --cpus-per-task={value} (Slurm), docker --cpuset-cpus=0-{last_core}, "
        "or remove taskset",
        "On average, {runnable:.1f} threads are ready to run."),
    "find_affinity": ActionText(
        "Check the script and its launcher for os.sched_setaffinity, taskset, numactl and "
        "KMP_AFFINITY",
        "One of them may restrict the run to these cores."),
    "bf16_on_cpu": _bf16(
        "cpu",
        "On CPUs with AMX or AVX512-BF16, matrix products can take half the time. No other "
        "bottleneck was found."),
    # Batch size
    "larger_batch": _batch(_FILL_GPU),
    "batch_times_larger": ActionText("Make the batch {times}× as large", _FILL_GPU),
    "larger_batch_on_cpu": _batch(
        "Up to {times}× as many samples in nearly the same time. Check the learning rate."),
    "smaller_batch": _batch(_SMALLER_BATCH),
    "reduce_batch": ActionText("Reduce the batch size", _SMALLER_BATCH),
    # GPU
    "pin_memory": ActionText(
        "Set pin_memory=True",
        "With non_blocking=True, copies from pinned memory do not block the host.",
        "--pin"),
    "copy_ahead": ActionText(
        "Copy one batch ahead on a separate CUDA stream: .to(device, non_blocking=True)",
        "The copy then overlaps with the computation."),
    "copy_fewer_bytes": ActionText(
        "Copy uint8 or bfloat16 and convert on the GPU",
        "This copies a quarter or half of the bytes that float32 takes."),
    "read_back_less_often": ActionText(
        "Accumulate on the GPU (total += loss.detach()) and read the result every 100 steps",
        "Each .item(), .cpu() or print of a tensor waits until the GPU has finished all its work."),
    "compile_to_graphs": _compile(
        "This fuses small kernels and replays a step as one CUDA graph.",
        'model, mode="reduce-overhead"'),
    "graph_callables": ActionText(
        "Use torch.cuda.make_graphed_callables(model, sample_args)",
        "This requires constant shapes."),
    "fused_optimizer": ActionText(
        "Pass fused=True to the optimizer",
        "A few kernel launches then update all parameters."),
    "compile": _compile(
        "The remaining gain is inside the kernels: fused kernels move less data."),
    "compile_for_larger_kernels": _compile("This produces fewer, larger kernels."),
    "compile_for_bandwidth": _compile(
        "Fused kernels read and write memory once instead of once per operation."),
    "bf16_for_bandwidth": _bf16("cuda", "This halves the bytes moved."),
    "bf16": _bf16("cuda", "Up to twice the throughput of TF32, and about half the activation "
                          "memory."),
    "tf32": ActionText(
        'Call torch.set_float32_matmul_precision("high")',
        "Matrix products then use TF32 on the tensor cores, with a 10-bit mantissa[. The current "
        'precision is "{precision}"].',
        "--precision {value}"),
    "find_gpu_processes": ActionText(
        "Stop the other process, or set CUDA_VISIBLE_DEVICES to another GPU",
        "List all processes with `nvidia-smi --query-compute-apps=pid,name,used_memory "
        "--format=csv`."),
    "exclusive_gpu": ActionText(
        "Run `nvidia-smi -c EXCLUSIVE_PROCESS`", "It allows one process at a time on the GPU."),
    "show_power_limit": ActionText(
        "Raise the power limit if the GPU allows it (`nvidia-smi -pl`)",
        "`nvidia-smi -q -d POWER` shows the current limit."),
    "better_cooling": ActionText(
        "Improve the cooling: fans, airflow, other devices in the chassis",
        "`nvidia-smi -q -d TEMPERATURE` shows the temperature limits."),
    # Ranks
    "balance_ranks": ActionText(
        "Check what only rank {rank} does here",
        "Distribute the work equally, or let the ranks take turns doing it."),
    "accumulate_gradients": ActionText(
        "Run all but the last of N micro-batches under model.no_sync()",
        "Gradients are then exchanged once per N micro-batches."),
    "compress_gradients": ActionText(
        "Call model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
        "This halves the bytes moved."),
    "larger_batch_per_rank": ActionText(
        "Use a larger batch per rank", "The same traffic then serves more samples."),
    # Training loop
    "evaluate_less_often": ActionText(
        "Evaluate less often, or on part of the validation set",
        "Evaluating a tenth as often takes a tenth of the time."),
    "larger_validation_batch": ActionText(
        "Use a larger batch_size for the validation loader, and torch.inference_mode()",
        "Without a backward pass no activations are kept, so a larger batch fits."),
    "save_less_often": ActionText(
        "Save less often: every N minutes instead of every N steps",
        "Save only as often as needed to limit the work lost in a failure."),
    "save_in_background": ActionText(
        "Use torch.distributed.checkpoint.async_save, or copy the state to the host and write it "
        "in a thread",
        "Training then continues while the checkpoint is written."),
    "log_less_often": ActionText(
        "Log every 50 steps (if step % 50 == 0:), and write in a separate thread",
        "Training pauses while the training thread formats and writes."),
    "remove_sleep": ActionText(
        "Remove the sleep", "Training pauses while the training thread sleeps."),
    # Memory
    "find_growth_in_dataset": ActionText(
        "Check the dataset for a list or dict that grows in __getitem__",
        "Each loader worker has its own copy of the dataset."),
    "find_growth_in_loop": ActionText(
        "Check the training loop for a list that keeps the tensors, losses or samples of every "
        "step",
        "Keep loss.item() or loss.detach() instead of loss."),
    "detach_loss": ActionText(
        "Keep loss.detach() or loss.item() instead of loss",
        "A loss keeps its entire autograd graph in memory."),
    "find_kept_outputs": ActionText(
        "Check the training loop for a list or dict that collects outputs, and move them to the "
        "host: outputs.detach().cpu()"),
    "find_growing_state": ActionText(
        _FIND_GROWING_STATE, "The training thread spends most of its time here."),
    "find_growing_state_anywhere": ActionText(_FIND_GROWING_STATE),
    "expandable_segments": ActionText(
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "This helps if tensor sizes vary from step to step."),
    "less_gpu_memory": ActionText(
        "Use a smaller batch_size, or torch.utils.checkpoint for the largest layers"),
    "halve_workers_or_prefetch": ActionText(
        "Halve num_workers or prefetch_factor", "Each loader worker holds its batches in memory."),
    "larger_shm": ActionText(
        "Enlarge /dev/shm: docker run --shm-size=8g, or --ipc=host",
        "Prefetched batches need num_workers × prefetch_factor × the size of a batch."),
    # Monitoring
    "mark_steps": ActionText(
        'Call stepscope.mark("step") at the end of each step',
        "stepscope can then distinguish data waits from kernel launches."),
    "train_longer": ActionText(
        "Train for at least {min_steps:.0f} steps and {min_seconds:.0f} s after the warm-up"),
    "open_report": ActionText("Look for the busiest resource in the charts of the report"),
}
# fmt: on
