"""One side of benchmarks/peers.py: an engine in a process of its own, with a model loaded once.

    PYTHON peer_worker.py ENGINE MODEL CORES LONGEST [DEVICE]

Prints a JSON line about itself, then answers each line ``pp TOKENS DEPTH`` or ``tg TOKENS DEPTH`` on
standard input with the seconds it took, which hold nothing but the model's steps: loading and filling the
cache up to DEPTH are left out. Runs in the engine's own environment, so it imports nothing but the
standard library and that engine. ENGINE is xinfer-vk, llama.cpp or transformers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[str, int, int], float]  # kind, tokens, depth → seconds


def token(i: int, vocabulary: int) -> int:
    """Made up, the same for every engine; the values do not change the work."""
    return 7919 * (i + 1) % vocabulary


def xinfer_vk(model: str, threads: int, longest: int, device: str) -> tuple[str, Run]:
    from xinfer_vk import __version__
    from xinfer_vk.engine.bench import Bench, Workload, load_subject
    from xinfer_vk.vulkan.runtime import open_runtime

    runtime = open_runtime(device or None)
    subject = load_subject(runtime, model, synthetic=False)
    bench = Bench(subject, [Workload("pp", longest)], "f16")

    warm: set[Workload] = set()  # their plans are recorded

    def run(kind: str, tokens: int, depth: int) -> float:
        test = Workload(kind, tokens, depth)
        seconds = bench.measure(test, repeats=1, warm_up=int(test not in warm)).run_s[0]
        warm.add(test)
        return seconds

    return f"xinfer-vk {__version__} on {runtime.profile.name} ({runtime.driver}), {subject.fmt}", run


def llama_cpp(model: str, threads: int, longest: int, device: str) -> tuple[str, Run]:
    import llama_cpp as llama

    engine = llama.Llama(
        model, n_ctx=longest, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
        n_gpu_layers=0, verbose=False,
    )  # fmt: skip
    vocabulary = engine.n_vocab()

    def evaluate(ids: list[int]) -> None:
        engine.eval(ids)
        llama.llama_synchronize(engine.ctx)

    def run(kind: str, tokens: int, depth: int) -> float:
        engine.reset()
        if depth:
            evaluate([token(i, vocabulary) for i in range(depth)])
        ids = [token(depth + i, vocabulary) for i in range(tokens)]
        steps = [ids] if kind == "pp" else [[each] for each in ids]
        began = time.perf_counter()
        for step in steps:
            evaluate(step)
        return time.perf_counter() - began

    return f"llama.cpp (llama-cpp-python {llama.__version__}), CPU back end", run


def transformers(model: str, threads: int, longest: int, device: str) -> tuple[str, Run]:
    import torch
    import transformers as hf

    torch.set_num_threads(threads)
    path = Path(model)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf":  # it is turned into f32 while it loads
        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    engine = hf.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    vocabulary = engine.config.vocab_size

    def evaluate(ids: list[int], cache: Any) -> None:
        engine(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)

    def run(kind: str, tokens: int, depth: int) -> float:
        with torch.inference_mode():
            cache = hf.DynamicCache(config=engine.config)
            if depth:
                evaluate([token(i, vocabulary) for i in range(depth)], cache)
            ids = [token(depth + i, vocabulary) for i in range(tokens)]
            steps = [ids] if kind == "pp" else [[each] for each in ids]
            began = time.perf_counter()
            for step in steps:
                evaluate(step, cache)
            return time.perf_counter() - began

    return f"transformers {hf.__version__} (torch {torch.__version__}), CPU, f32", run


ENGINES = {"xinfer-vk": xinfer_vk, "llama.cpp": llama_cpp, "transformers": transformers}


def main() -> None:
    name, model, cores, longest, *device = sys.argv[1:]
    pinned = {int(core) for core in cores.split(",")}
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, pinned)
    about, run = ENGINES[name](model, len(pinned), int(longest), device[0] if device else "")
    print(json.dumps({"about": about}), flush=True)
    for line in sys.stdin:
        kind, tokens, depth = line.split()
        print(json.dumps({"seconds": run(kind, int(tokens), int(depth))}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
