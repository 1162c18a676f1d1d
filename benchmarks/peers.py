"""Each head of a model silenced in turn, by needlework and by what people have: `python benchmarks/peers.py [MODEL ...]`

Eight prompts of 256 tokens, next token, every head silenced once: at every position (goal: 1.8 times as fast as each other way),
or at the last one only, needlework's decode (goal: 20 times). The others, one forward of all prompts for each head:

- a plain hook on the output projection of the stock model (SDPA);
- nnsight, which edits the same tensor;
- TransformerLens, where it has a hook on single heads (tiny-transformer, tiny-jamba; it loads tiny-griffin with hooks on the
  residual stream only), in an environment of its own: it wants a newer typeguard than ours.

All must name the same tokens before anything is timed. Rounds in which every way takes its turn, in alternating order, on one
thread; processor time is compared, not time on the wall: what else the machine does is nobody's cost. `--every N` takes each
N-th head, `--rounds`, `--without transformer_lens` make it shorter. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import site
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness

MODELS = ("tiny-transformer", "tiny-griffin", "tiny-jamba")
PROMPTS, TOKENS = 8, 256
GOALS = {"at every position": 1.8, "at the last position": 20.0}
LENS = ("transformer_lens==4.3.0", "typeguard==4.6.0")
LENS_HEADS = ("LlamaForCausalLM", "JambaForCausalLM")  # classes whose heads have hooks in TransformerLens
Heads = Sequence[tuple[int, int]]
Way = Callable[[Heads, bool], tuple[list[list[int]], float]]  # heads, last position only -> next tokens, processor seconds


def prompts(vocabulary: int) -> Any:
    import torch

    return torch.randint(3, vocabulary, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(0))


def timed(each: Callable[[int, int, bool], list[int]]) -> Way:
    return lambda heads, last: harness.timed(lambda: [each(*head, last) for head in heads], time.process_time)


def needlework(subject: Any, ids: Any) -> Way:
    import needlework as nw
    from needlework.requests import Request

    def way(heads: Heads, last: bool) -> tuple[list[list[int]], float]:
        start = time.process_time()
        phase, boundary = ("decode", "decode") if last else ("prefill", "prefill")
        acts = [nw.AblateHeads(heads=[head], phase=phase) for head in heads]
        asked = [Request(tuple(p), act, 1, boundary=boundary) for act in acts for p in ids.tolist()]  # type: ignore[arg-type]
        said = [answer.tokens[0] for answer in subject.answer(asked)]
        return [said[i : i + len(ids)] for i in range(0, len(said), len(ids))], time.process_time() - start

    return way


def places(subject: Any) -> dict[int, tuple[str, int]]:
    """Path of each attention layer's output projection, and the width of a head there."""
    found = {}
    for layer, part in subject.anatomy.attention_parts():
        module = subject.model.get_submodule(part.path)
        name = next(name for name in ("o_proj", "out_proj", "dense") if hasattr(module, name))
        found[layer] = (f"{part.path}.{name}", part.value_dim)
    return found


def silenced(heads: Any, head: int, width: int, last: bool) -> Any:
    edited = heads.clone()
    edited[:, -1 if last else slice(None), head * width : (head + 1) * width] = 0
    return edited


def plain_hook(model: Any, ids: Any, where: dict[int, tuple[str, int]]) -> Way:
    import torch

    @torch.inference_mode()
    def each(layer: int, head: int, last: bool) -> list[int]:
        path, width = where[layer]
        hook = lambda module, args: (silenced(args[0], head, width, last), *args[1:])  # noqa: E731
        handle = model.get_submodule(path).register_forward_pre_hook(hook)
        try:
            tokens: list[int] = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
            return tokens
        finally:
            handle.remove()

    return timed(each)


def nnsight(model: Any, ids: Any, where: dict[int, tuple[str, int]]) -> Way:
    import torch
    from nnsight import NNsight

    traced = NNsight(model)

    @torch.inference_mode()
    def each(layer: int, head: int, last: bool) -> list[int]:
        path, width = where[layer]
        projection = traced
        for name in path.split("."):
            projection = projection[int(name)] if name.isdigit() else getattr(projection, name)
        with traced.trace(input_ids=ids, use_cache=False, logits_to_keep=1):
            projection.input = silenced(projection.input, head, width, last)
            logits = traced.lm_head.output.save()
        tokens: list[int] = logits[:, -1].argmax(-1).tolist()
        return tokens

    return timed(each)


# --- TransformerLens, in a process of its own ----------------------------------------------------------------------------------


def environment(directory: Path) -> Path:
    """A Python that has TransformerLens and, behind it, everything that this one has."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    packages = next((directory / "lib").glob("python3*/site-packages"))
    (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))
    done = subprocess.run([str(python), "-m", "pip", "install", "-q", *LENS], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(LENS)} cannot be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return python


def lens_server(path: str, vocabulary: int) -> None:
    """Answers lines of JSON, [heads, last position only], with [next tokens, processor seconds]."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    torch.set_num_threads(1)
    bridge, ids = TransformerBridge.boot_transformers(path, device="cpu"), prompts(vocabulary)

    @torch.inference_mode()
    def each(layer: int, head: int, last: bool) -> list[int]:
        def silence(z: Any, hook: Any) -> Any:  # [rows, tokens, heads, dim]
            return silenced(z.flatten(2), head, z.shape[3], last).view(z.shape)

        logits = bridge.run_with_hooks(ids, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", silence)], return_type="logits")
        tokens: list[int] = logits[:, -1].argmax(-1).tolist()
        return tokens

    for line in sys.stdin:
        print("answer:" + json.dumps(timed(each)(*json.loads(line))), flush=True)


def transformer_lens(python: Path, path: str, vocabulary: int) -> tuple[Way, Callable[[], object]]:
    command = [str(python), __file__, "--lens-server", path, str(vocabulary)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    server = subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )

    def way(heads: Heads, last: bool) -> tuple[list[list[int]], float]:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([list(heads), last]) + "\n")
        server.stdin.flush()
        for line in server.stdout:
            if line.startswith("answer:"):
                tokens, seconds = json.loads(line.removeprefix("answer:"))
                return tokens, seconds
        raise OSError(f"TransformerLens ended with exit code {server.wait()}")

    return way, server.kill


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(name: str, options: argparse.Namespace, python: Path | None) -> list[tuple[str, str, str, float, float, float]]:
    """For every way and both places: (model, place, way, seconds of needlework, seconds of the way, ratio)."""
    import torch
    from transformers import AutoModelForCausalLM

    import needlework as nw
    from needlework import zoo

    torch.set_num_threads(1)
    subject = nw.load(name)
    vocabulary = subject.anatomy.vocabulary
    heads = [tuple(head) for head in subject.anatomy.heads][:: options.every]
    ids, where = prompts(vocabulary), places(subject)
    stock = [AutoModelForCausalLM.from_pretrained(zoo.path(name)).eval() for _ in range(2)]
    ways = {"needlework": needlework(subject, ids), "plain hook": plain_hook(stock[0], ids, where)}
    end: Callable[[], object] = lambda: None  # noqa: E731
    if "nnsight" not in options.without:
        ways["nnsight"] = nnsight(stock[1], ids, where)
    if python is not None and subject.anatomy.architecture in LENS_HEADS:
        ways["TransformerLens"], end = transformer_lens(python, str(zoo.path(name)), vocabulary)
    lines = []
    try:
        for place, last in (("at every position", False), ("at the last position", True)):
            few = heads[:: max(1, len(heads) // 8)]
            work, less = ({way: partial(run, some, last) for way, run in ways.items()} for some in (heads, few))
            found = harness.compare(work, options.rounds, f"{name}, {place}", warm_up=less)
            ours = found.median("needlework")
            for way in (way for way in ways if way != "needlework"):
                ratio = found.ratio(way, "needlework")
                lines.append((f"{name}, {len(heads)} heads", place, way, ours, found.median(way), ratio))
                print(
                    f"{ratio:6.2f}x  {name}, {place}: {ours:.2f} s against {found.median(way):.2f} s of {way}",
                    flush=True,
                )
    finally:
        end()
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help=f"by default {', '.join(MODELS)}")
    parser.add_argument("--every", type=int, default=1, help="take each N-th head")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=[], choices=["nnsight", "transformer_lens"])
    parser.add_argument("--lens-server", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lens_server:
        lens_server(options.lens_server[0], int(options.lens_server[1]))
        return 0
    lines, python = [], None
    with tempfile.TemporaryDirectory() as directory:
        if "transformer_lens" not in options.without and {"tiny-transformer", "tiny-jamba"} & set(options.models):
            try:
                python = environment(Path(directory) / "lens")
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"without TransformerLens: {error}")
        for name in options.models:
            lines += compare(name, options, python)
    print("load of the machine (1, 5, 15 minutes): " + ", ".join(f"{x:.1f}" for x in os.getloadavg()))
    low = [line for line in lines if line[5] < GOALS[line[1]]]
    return harness.report_goals([f"{line[5]:.2f} < {GOALS[line[1]]:g}, {', '.join(line[:3])}" for line in low])


if __name__ == "__main__":
    raise SystemExit(main())
