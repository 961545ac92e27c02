"""The words of recommendations: one row for each action, worded for scripts and for trials."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ActionWords:
    """A change: as code or a command for a script, as an option for a trial, and why.

    Templates as in `words`, with the new `{value}` of the setting.
    """

    change: str
    why: str = ""
    option: str = ""  # of `stepscope trial`; empty where a trial has none


def _workers(why: str = "") -> ActionWords:
    return ActionWords("num_workers={value}", why, "--workers {value}")


def _batch(why: str) -> ActionWords:
    return ActionWords("batch_size={value}", why, "--batch-size {value}")


def _compile(why: str, arguments: str = "model") -> ActionWords:
    return ActionWords(f"model = torch.compile({arguments})", why, "--compile")


_FILL_GPU = (
    "up to {times} times as many samples in the time of a step, and more beyond until the GPU is "
    "filled; check the learning rate, and that it fits"
)
_LESS_BATCH = "a little less, and nothing has to be freed"
_FIND_KEPT = (
    "look for something that is kept from every step and gone through in each: a list of losses, a "
    "running statistic over all of it, a graph that is never freed"
)

# fmt: off
ACTIONS: dict[str, ActionWords] = {
    # Data loading
    "enough_workers": _workers(
        "a batch takes {batch_preparation:ms} to prepare and is needed every {step_besides:ms}"),
    "more_workers": _workers(),
    "more_reads_at_once": _workers(
        "more reads under way at once help if it is latency that is waited for, not if the link is "
        "full"),
    "cheaper_transform": ActionWords(
        "make the transform cheaper: vectorise it, decode to the size that is needed, or move it "
        "to the GPU",
        "a batch takes {batch_cpu:ms} of CPU, and the training needs one every {rest:ms}"),
    "prepare_data_once": ActionWords(
        "prepare the data set once and store the result", "every epoch does the same work again"),
    "copy_data_near": ActionWords(
        "copy the data set to a local disk or into memory before training",
        "reads come at {rate:mb1}/s"),
    "larger_files": ActionWords(
        "store samples in larger files (tar shards, Parquet, LMDB)",
        "many small reads pay the latency of each"),
    "collate_without_loops": ActionWords(
        "a collate_fn that allocates once and copies (torch.stack(samples, out=…), pad_sequence)",
        "loops over elements in Python are what takes long"),
    "prefetch_more": ActionWords(
        "prefetch_factor={value}", "more batches on their way", "--prefetch {value}"),
    "fewer_tensors": ActionWords(
        "return one tensor per field from the data set, not many small ones",
        "each tensor is a file descriptor to hand over"),
    "keep_workers": ActionWords(
        "persistent_workers=True", "workers stay for the next epoch", "--persistent"),
    # CPU cores
    "find_processes": ActionWords(
        "ps -eo pid,pcpu,user,args --sort=-pcpu | head",
        "tells who they are: stop them, or move one of the two elsewhere"),
    "exclusive_cores": ActionWords(
        "ask for cores of your own: --exclusive (Slurm), docker --cpuset-cpus on both",
        "an affinity of yours keeps nobody else out"),
    "raise_quota": ActionWords(
        "raise the quota of the container (docker --cpus, resources.limits.cpu in Kubernetes)",
        "it is {allowed:g} cores of {machine:g}"),
    "threads_of_workers": ActionWords(
        "torch.set_num_threads({value})",
        "in worker_init_fn: {workers} workers then use {value} each"),
    "threads_of_processes": ActionWords(
        "torch.set_num_threads({value})", "at the beginning of each process"),
    "threads_of_libraries": ActionWords(
        "OMP_NUM_THREADS={value} MKL_NUM_THREADS={value} python …",
        "for NumPy, OpenCV and other libraries with pools of their own"),
    "more_threads": ActionWords("torch.set_num_threads({value})", "or unset OMP_NUM_THREADS"),
    "more_cores": ActionWords(
        "ask for more CPUs: --cpus-per-task={value} (Slurm), docker --cpuset-cpus=0-{last_core}, "
        "or drop the taskset",
        "{wanted:.1f} threads want to run"),
    "find_affinity": ActionWords(
        "look for os.sched_setaffinity, taskset, numactl and KMP_AFFINITY in the script and in "
        "what starts it",
        "one of them narrowed it"),
    "bf16_on_cpu": ActionWords(
        "with torch.autocast('cpu', dtype=torch.bfloat16): around the forward pass",
        "on CPUs with AMX or AVX512-BF16 products take half the time; nothing else in the script "
        "holds it back",
        "--precision {value}"),
    # Batch size
    "larger_batch": _batch(_FILL_GPU),
    "batch_times_larger": ActionWords("a batch {times} times as large", _FILL_GPU),
    "larger_batch_on_cpu": _batch(
        "up to {times} times as many samples in nearly the same time; check the learning rate"),
    "smaller_batch": _batch(_LESS_BATCH),
    "some_smaller_batch": ActionWords("a smaller batch", _LESS_BATCH),
    # GPU
    "pin_memory": ActionWords(
        "pin_memory=True", "copies from pinned memory need no second copy and do not block",
        "--pin"),
    "copy_ahead": ActionWords(
        ".to(device, non_blocking=True), one batch ahead on a stream of its own",
        "the copy then runs beside the computation"),
    "copy_fewer_bytes": ActionWords(
        "copy uint8 or bfloat16 and convert on the GPU", "a quarter or half of the bytes"),
    "read_back_rarely": ActionWords(
        "add it up on the GPU (total += loss.detach()) and read it every 100 steps",
        "each .item(), .cpu(), print of a tensor waits until the GPU has done all its work"),
    "compile_to_graphs": _compile(
        "fuses small kernels and replays a step as one CUDA graph",
        'model, mode="reduce-overhead"'),
    "graph_callables": ActionWords(
        "torch.cuda.make_graphed_callables(model, sample_args)", "where shapes never change"),
    "fused_optimizer": ActionWords(
        "torch.optim.…(params, fused=True)", "one launch instead of one per parameter"),
    "compile": _compile("what is left to gain is inside the kernels: fused, they move less memory"),
    "compile_for_larger_kernels": _compile("fewer and larger kernels"),
    "compile_for_bandwidth": _compile(
        "fused kernels read and write memory once instead of once for each operation"),
    "bf16_for_bandwidth": ActionWords(
        "torch.autocast('cuda', dtype=torch.bfloat16)", "half as many bytes",
        "--precision {value}"),
    "bf16": ActionWords(
        "with torch.autocast('cuda', dtype=torch.bfloat16):",
        "around the forward pass and the loss: twice the rate of TF32, half the memory",
        "--precision {value}"),
    "tf32": ActionWords(
        'torch.set_float32_matmul_precision("high")',
        'TF32 on the tensor cores; 10 bits of mantissa in products[, now it is "{precision}"]',
        "--precision {value}"),
    "find_gpu_processes": ActionWords(
        "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
        "tells who it is: stop it, or set CUDA_VISIBLE_DEVICES to another GPU"),
    "exclusive_gpu": ActionWords(
        "nvidia-smi -c EXCLUSIVE_PROCESS", "lets one process at a time on the GPU"),
    "show_power_limit": ActionWords(
        "nvidia-smi -q -d POWER", "shows the limit; some cards allow a higher one (-pl)"),
    "better_cooling": ActionWords(
        "see to the cooling: fans, air flow, neighbours in the chassis",
        "nvidia-smi -q -d TEMPERATURE shows the limits"),
    # Ranks
    "look_at_straggler": ActionWords(
        "look at what rank {rank} alone does here",
        "give the ranks equal work, or let this be done by all of them in turn"),
    "accumulate_gradients": ActionWords(
        "with model.no_sync(): for all but the last of N micro-batches",
        "gradients are exchanged once in N steps"),
    "compress_gradients": ActionWords(
        "model.register_comm_hook(None, default_hooks.bf16_compress_hook)", "half as many bytes"),
    "larger_batch_per_rank": ActionWords(
        "a larger batch per rank", "as many bytes for more samples"),
    # Besides training
    "evaluate_less_often": ActionWords(
        "evaluate less often, or on a part of the validation set", "every 10th time costs a tenth"),
    "larger_validation_batch": ActionWords(
        "a larger batch_size for the validation loader, under torch.inference_mode()",
        "nothing is kept for a backward pass"),
    "save_less_often": ActionWords(
        "save less often: every N minutes instead of every N steps",
        "what a checkpoint protects is time"),
    "save_in_background": ActionWords(
        "torch.distributed.checkpoint.async_save, or copy the state to the host and write it in a "
        "thread",
        "training goes on while it is written"),
    "log_less_often": ActionWords(
        "log every 50 steps (if step % 50 == 0:), and let a thread write",
        "nothing is computed while it formats and writes"),
    "remove_sleep": ActionWords("remove the sleep", "nothing else runs meanwhile"),
    # Memory
    "find_growth_in_dataset": ActionWords(
        "look in the data set for a list or dict that grows in __getitem__",
        "workers are copies of it: each keeps its own"),
    "find_growth_in_loop": ActionWords(
        "look for a list that keeps tensors, losses or samples of every step",
        "keep loss.item() or loss.detach(), not loss"),
    "detach_loss": ActionWords(
        "keep loss.detach() or loss.item(), not loss", "a loss that is kept keeps its whole graph"),
    "find_kept_outputs": ActionWords(
        "look for a list or dict that outputs are appended to in the loop, and move what is kept "
        "to the host: outputs.detach().cpu()"),
    "find_what_is_kept": ActionWords(_FIND_KEPT, "the training thread is mostly here"),
    "find_what_is_kept_somewhere": ActionWords(_FIND_KEPT),
    "expandable_segments": ActionWords(
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python …",
        "if sizes vary from step to step"),
    "less_gpu_memory": ActionWords(
        "a smaller batch_size, or torch.utils.checkpoint for the largest layers"),
    "halve_workers_or_prefetch": ActionWords(
        "num_workers or prefetch_factor lower by half", "each worker holds its batches in memory"),
    "larger_shm": ActionWords(
        "docker run --shm-size=8g, or --ipc=host",
        "batches on their way need workers × prefetch_factor × batch"),
    "share_through_files": ActionWords(
        "torch.multiprocessing.set_sharing_strategy('file_system')"),
    # What was measured
    "mark_steps": ActionWords(
        'stepscope.mark("step") at the end of each step',
        "then waits and launches can be told apart"),
    "train_longer": ActionWords(
        "let it train for half a minute, and for a hundred steps at least", "after the warm-up"),
    "look_at_panels": ActionWords(
        "look at the panels of the report", "they show what was used over time"),
}
# fmt: on
