"""One side of benchmarks/peers.py: an engine in a process of its own, with a model loaded once.

    PYTHON peer_worker.py '{"engine": …, "model": …, "cores": […], "longest": …, …}'

Prints a JSON line about itself, then answers each line ``pp TOKENS DEPTH`` or ``tg TOKENS DEPTH`` on
standard input with the seconds it took, which hold nothing but the model's steps: loading and filling the
cache up to DEPTH are left out. Runs in the engine's own environment, so it imports nothing but the
standard library and that engine. ENGINE is xinfer-vk, llama.cpp or transformers.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[str, int, int], float]  # kind, tokens, depth → seconds
About = dict[str, Any]

ALL_LAYERS = -1
GPU_KINDS = (1, 2)  # of ggml_backend_dev_type: discrete or (as it calls CPU devices of Vulkan) any other


def token(i: int, vocabulary: int) -> int:
    """Made up, the same for every engine; the values do not change the work."""
    return 7919 * (i + 1) % vocabulary


def xinfer_vk(asked: dict[str, Any]) -> tuple[About, Run]:
    from xinfer_vk import __version__
    from xinfer_vk.cli.bench_report import commit
    from xinfer_vk.engine.bench import Bench, Workload, load_subject
    from xinfer_vk.vulkan.runtime import open_runtime

    runtime = open_runtime(asked["device"] or None)
    subject = load_subject(runtime, asked["model"], synthetic=False)
    bench = Bench(subject, [Workload("pp", asked["longest"])], "f16", activations=asked["activations"])

    warm: set[Workload] = set()  # their plans are recorded

    def run(kind: str, tokens: int, depth: int) -> float:
        test = Workload(kind, tokens, depth)
        seconds = bench.measure(test, repeats=1, warm_up=int(test not in warm)).run_s[0]
        warm.add(test)
        return seconds

    name, info = runtime.profile.name, getattr(runtime, "info", None)
    version = " ".join(filter(None, (__version__, commit())))
    int8 = ", int8 activations" if asked["activations"] == "int8" else ""
    text = f"xinfer-vk {version} on {name} ({runtime.driver}), {subject.fmt}{int8}"
    return {"text": text, "index": None if info is None else info.index, "device": name}, run


def llama_cpp(asked: dict[str, Any]) -> tuple[About, Run]:
    import llama_cpp as llama
    from llama_cpp._ggml import libggml

    threads, longest, on_gpu = len(asked["cores"]), asked["longest"], asked["backend"] == "gpu"
    said: list[str] = []

    @llama.llama_log_callback
    def listen(level: int, text: bytes, data: Any) -> None:
        said.append(text.decode(errors="replace"))

    llama.llama_log_set(listen, ctypes.c_void_p(0))
    llama.llama_backend_init()
    found = ggml_gpus(libggml)
    if found != ([asked["device"]] if on_gpu else []):
        seen = ", ".join(found) or "none"
        raise SystemExit(
            f"this llama.cpp sees the Vulkan devices: {seen}; wanted: {asked['device'] or 'none'}"
        )
    engine = llama.Llama(
        asked["model"], n_ctx=longest, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
        n_gpu_layers=ALL_LAYERS if on_gpu else 0, flash_attn=asked["flash_attention"], verbose=False,
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

    libggml.ggml_version.restype = libggml.ggml_commit.restype = ctypes.c_char_p
    ggml = f"ggml {libggml.ggml_version().decode()} {libggml.ggml_commit().decode()}"
    where = f"CPU back end, {threads} threads"
    if on_gpu:
        offloaded = re.search(r"offloaded (\d+)/(\d+) layers", "".join(said))
        if offloaded is None or offloaded[1] != offloaded[2]:
            raise SystemExit(f"not all layers are on the device: {offloaded and offloaded[0]}")
        where = f"Vulkan back end on {found[0]}, {offloaded[0]}"
    attention = "on" if asked["flash_attention"] else "off"
    text = f"llama.cpp (llama-cpp-python {llama.__version__}, {ggml}), {where}, flash attention {attention}"
    run.log = listen  # type: ignore[attr-defined]  # llama.cpp calls it as long as it lives
    return {"text": text}, run


def ggml_gpus(ggml: Any) -> list[str]:
    """What this llama.cpp could run on that is not its CPU back end."""
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    at, kind, name = ggml.ggml_backend_dev_get, ggml.ggml_backend_dev_type, ggml.ggml_backend_dev_description
    at.argtypes, at.restype = (ctypes.c_size_t,), ctypes.c_void_p
    kind.argtypes, kind.restype = (ctypes.c_void_p,), ctypes.c_int
    name.argtypes, name.restype = (ctypes.c_void_p,), ctypes.c_char_p
    devices = [at(i) for i in range(ggml.ggml_backend_dev_count())]
    return [name(device).decode() for device in devices if kind(device) in GPU_KINDS]


def transformers(asked: dict[str, Any]) -> tuple[About, Run]:
    import torch
    import transformers as hf

    torch.set_num_threads(len(asked["cores"]))
    path = Path(asked["model"])
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

    return {"text": f"transformers {hf.__version__} (torch {torch.__version__}), CPU, f32"}, run


ENGINES = {"xinfer-vk": xinfer_vk, "llama.cpp": llama_cpp, "transformers": transformers}


def main() -> None:
    asked = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, asked["cores"])
    about, run = ENGINES[asked["engine"]](asked)
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        kind, tokens, depth = line.split()
        print(json.dumps({"seconds": run(kind, int(tokens), int(depth))}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
