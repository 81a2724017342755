"""Whether llama.cpp reads the GGUF files of tests/gguf_families.py as transformers reads the checkpoints they
are made of. A check by hand, not in CI: our reader is tested with the same files, so that a mistake that it
shares with their writer would show here.

    pip install llama-cpp-python
    PYTHONPATH=tests python benchmarks/llama_cpp_families.py

Logits in f32 with an f32 KV cache, at every position of the 75 tokens of each fixture. Where Gemma differs
by some 1e-3, it is the table of f16 from which llama.cpp takes GELU.
"""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path

import numpy as np
from gguf_families import write_gguf_of

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "models" / "families"


def logits(path: Path, token_ids: np.ndarray, vocabulary: int) -> np.ndarray:
    """What llama.cpp computes for a text, ``float32 [tokens, vocabulary]``."""
    import llama_cpp as ll

    model_params, params = ll.llama_model_default_params(), ll.llama_context_default_params()
    model_params.n_gpu_layers = 0
    params.n_ctx = params.n_batch = params.n_ubatch = 128
    params.type_k = params.type_v = 0  # f32
    params.flash_attn_type = 0
    model = ll.llama_model_load_from_file(str(path).encode(), model_params)
    if not model:
        raise SystemExit(f"{path.name}: llama.cpp does not load it")
    context = ll.llama_init_from_model(model, params)
    batch = ll.llama_batch_init(len(token_ids), 0, 1)
    batch.n_tokens = len(token_ids)
    for i, token in enumerate(token_ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, 1
        batch.seq_id[i][0] = 0
    if ll.llama_decode(context, batch):
        raise SystemExit(f"{path.name}: llama.cpp does not run it")
    rows = [
        np.ctypeslib.as_array(ll.llama_get_logits_ith(context, i), (vocabulary,)).copy()
        for i in range(len(token_ids))
    ]
    ll.llama_free(context)
    ll.llama_model_free(model)
    return np.stack(rows)


def main() -> None:
    import llama_cpp as ll

    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(quiet, ctypes.c_void_p(0))
    ll.llama_backend_init()
    print(f"llama-cpp-python {ll.__version__}: largest difference of a logit, and up to position 18")
    with tempfile.TemporaryDirectory() as folder:
        for checkpoint in sorted(FOLDER.iterdir()):
            reference = np.load(checkpoint / "reference.npz")
            path = Path(folder) / f"{checkpoint.name}.gguf"
            try:
                write_gguf_of(checkpoint, path, tokenizer="no_vocab")
            except (KeyError, ValueError):
                print(f"{checkpoint.name}: cannot be said in GGUF")
                continue
            got = logits(path, reference["token_ids"], reference["logits"].shape[1])
            error = np.abs(got - reference["logits"])
            print(f"{checkpoint.name}: {error.max():.1e}, {error[:19].max():.1e}")


if __name__ == "__main__":
    main()
