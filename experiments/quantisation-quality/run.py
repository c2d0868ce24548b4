"""What quantised weights and a bfloat16 cache cost in quality: perplexity of the default model on English prose.

Usage: python run.py [tokens=20480]

The text is what every Python carries as help on its language (pydoc_data.topics), its full sentences without code,
in windows of 512 tokens that know nothing of each other. Writes result.json and README.md beside this file; ends with
status 1 if a quantised format is worse than its limit.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from servekit import LLM
from servekit.config.compose import compose_serve
from servekit.model.source import default_cache_dir, fetch
from servekit.model.tokenizer import load_tokenizer
from servekit.runner.device import usable_cores

HERE = Path(__file__).parent
WINDOW_TOKENS = 512
DEFAULT_TOKENS = 40 * WINDOW_TOKENS


_ABOUT = """\
Perplexity of SmolLM2-135M-Instruct on {tokens:,} tokens of English prose, in windows of {window} that know nothing of
each other: the full sentences of the help texts that come with Python {python} (`pydoc_data.topics`). The model's file
holds Q4_1 integers: float32 means these, dequantised; int8 rounds them again, by output channel; int4 multiplies by
them as they are, with activations rounded to 8 bits and the head in int8. The reference kernels keep no bfloat16 cache
beside float32 weights. Measured with `python run.py` on {date}, on {cores} cores of this processor: {processor}."""


@dataclass(frozen=True)
class Variant:
    """One way of keeping weights and cache."""

    kernels: str
    quantization: str
    kv_dtype: str
    most_ratio: float | None = None
    """Largest perplexity that is accepted, over that of the reference in float32; None: not limited."""

    @property
    def overrides(self) -> list[str]:
        return [f"engine.kernels={self.kernels}", f"model.quantization={self.quantization}",
                f"memory.kv_dtype={self.kv_dtype}"]


REFERENCE = Variant("reference", "none", "float32")
VARIANTS = (
    Variant("cpu", "none", "float32"), Variant("cpu", "none", "bfloat16"),
    Variant("cpu", "int8", "float32", 1.015), Variant("cpu", "int8", "bfloat16", 1.015),
    Variant("cpu", "int4", "float32", 1.04), Variant("cpu", "int4", "bfloat16", 1.04),
)


@dataclass(frozen=True)
class Measured:
    """The perplexity of one variant."""

    variant: Variant
    perplexity: float
    num_scored_tokens: int


def prose() -> list[str]:
    """Paragraphs of full sentences, each once, in the order of the help texts."""
    paragraphs = (" ".join(paragraph.split()) for text in topics.values() for paragraph in text.split("\n\n"))
    return [paragraph for paragraph in dict.fromkeys(paragraphs) if _is_prose(paragraph)]


def _is_prose(paragraph: str) -> bool:
    share_of_words = sum(character.isalpha() or character == " " for character in paragraph) / max(1, len(paragraph))
    return (len(paragraph) >= 150 and paragraph[0].isupper() and paragraph[0].isalpha() and paragraph.endswith(".")
            and share_of_words > 0.92)


def windows(num_tokens: int, model_overrides: Sequence[str] = ()) -> list[list[int]]:
    """The text's first tokens, cut into windows."""
    config = compose_serve(list(model_overrides), environ=os.environ).config.model
    local = fetch(config, default_cache_dir(os.environ), lambda what, done, total: None)
    tokenizer = load_tokenizer(local, None)
    ids = tokenizer.encode("\n\n".join(prose()), add_special_tokens=False)
    if len(ids) < num_tokens:
        raise SystemExit(f"tokens={num_tokens}: this Python's help texts have {len(ids)}; ask for fewer")
    return [list(ids[start:start + WINDOW_TOKENS]) for start in range(0, num_tokens, WINDOW_TOKENS)]


def measure(variant: Variant, prompts: Sequence[Sequence[int]], model_overrides: Sequence[str] = ()) -> Measured:
    """Perplexity: e to the mean negative log-likelihood of every token but the first of each window."""
    llm = LLM("smollm2-135m", ["model.max_model_len=1024", "scheduler.max_num_seqs=8", "scheduler.max_step_tokens=512",
                               "scheduler.prefill.chunk_tokens=512", "scheduler/prefix_cache=none",
                               "scheduler.admission.queue_timeout_s=null",
                               "scheduler.admission.request_timeout_s=null",
                               *model_overrides, *variant.overrides])
    answers = llm.generate(prompts, max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    scores = [score.logprob for answer in answers for score in answer.prompt_logprobs if score is not None]
    expected = sum(len(prompt) - 1 for prompt in prompts)
    if len(scores) != expected:
        raise RuntimeError(f"{len(scores)} tokens were scored of {expected}: {answers[0].message}")
    return Measured(variant, math.exp(-math.fsum(scores) / len(scores)), len(scores))


def table(reference: Measured, results: Sequence[Measured]) -> str:
    lines = ["| kernels | weights | KV cache | perplexity | over the reference | limit |",
             "| --- | --- | --- | --- | --- | --- |"]
    for result in (reference, *results):
        variant, limit = result.variant, result.variant.most_ratio
        lines.append(f"| {variant.kernels} | {_weights(variant)} | {variant.kv_dtype} | {result.perplexity:.4f} "
                     f"| {_percent(result.perplexity / reference.perplexity)} "
                     f"| {_percent(limit) if limit else ''} |")
    return "\n".join(lines)


def _weights(variant: Variant) -> str:
    return {"none": "float32", "int8": "int8 by channel", "int4": "int4, the file's own"}[variant.quantization]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


def machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = dict(line.split("\t: ", 1) for line in lines if "\t: " in line)
    name = next((value for key, value in facts.items() if key.startswith("model name")), platform.processor())
    return {"processor": name, "cores": str(usable_cores()), "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d")}


def write(reference: Measured, results: Sequence[Measured], facts: dict[str, str]) -> None:
    rows = [{"kernels": one.variant.kernels, "quantization": one.variant.quantization,
             "kv_dtype": one.variant.kv_dtype, "perplexity": one.perplexity,
             "ratio": one.perplexity / reference.perplexity, "most_ratio": one.variant.most_ratio,
             "scored_tokens": one.num_scored_tokens}
            for one in (reference, *results)]
    (HERE / "result.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
    about = _ABOUT.format(tokens=reference.num_scored_tokens, window=WINDOW_TOKENS, **facts)
    (HERE / "README.md").write_text(
        f"# Quality of quantised weights\n\n{textwrap.fill(about, 120)}\n\n{table(reference, results)}\n")


def main() -> int:
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    prompts = windows(int(arguments.get("tokens", DEFAULT_TOKENS)))
    reference = measure(REFERENCE, prompts)
    results = []
    for variant in VARIANTS:
        results.append(measure(variant, prompts))
        print(f"{' '.join(variant.overrides)}: {results[-1].perplexity:.4f}", file=sys.stderr, flush=True)
    print(table(reference, results))
    write(reference, results, machine())
    broken = [one.variant for one in results
              if one.variant.most_ratio and one.perplexity > one.variant.most_ratio * reference.perplexity]
    for variant in broken:
        print(f"{' '.join(variant.overrides)}: worse than its limit", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
