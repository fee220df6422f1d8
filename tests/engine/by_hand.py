"""What Hugging Face models of several weights say, each position computed by the one whose turn it was."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout.types import Trajectory


@cache
def theirs(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def logprobs_NV(ids: Sequence[int], runs: Sequence[tuple[Path, int]]) -> Tensor:
    """Log-probabilities of what follows each position, where so many positions after one another are computed by the
    model of each path, on the KV of those before."""
    past, at, found = None, 0, []
    with torch.no_grad():
        for path, tokens in runs:
            if tokens:
                out = theirs(path)(torch.tensor([ids[at : at + tokens]]), cache=past, use_cache=True)
                past, at = out.cache, at + tokens
                found.append(out.logits[0].log_softmax(-1))
    assert at == len(ids), (at, len(ids))
    return torch.cat(found)


def version_column(trajectory: Trajectory) -> list[int]:
    return [run.version for run in trajectory.versions for _ in range(run.tokens) if run.version is not None]


def assert_greedy_as_it_says(paths: Mapping[int, Path], trajectory: Trajectory) -> None:
    """Every token is the best, and has the log-probability, on KV of the versions that `kv_spans` names."""
    ids = [*trajectory.prompt_ids, *trajectory.output_ids]
    prompt, versions = len(trajectory.prompt_ids), version_column(trajectory)
    at = prompt
    for span in trajectory.kv_spans:
        assert span.first == at
        assert [start for start, _, _ in span.kv] == [0, *(stop for _, stop, _ in span.kv[:-1])]
        assert span.kv[-1][1] == span.first
        (version,) = {*versions[span.first - prompt : span.stop - prompt]}
        assert span.kv[-1][2] == version, "the token before is fed by whoever samples"
        runs = [(paths[by], stop - start) for start, stop, by in span.kv]
        runs.append((paths[version], span.stop - 1 - span.first))
        said = logprobs_NV(ids[: span.stop - 1], runs)[span.first - 1 :]
        sampled = ids[span.first : span.stop]
        assert said.argmax(-1).tolist() == sampled
        expected = said.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()
        assert trajectory.logprobs[span.first - prompt : span.stop - prompt] == pytest.approx(expected, abs=1e-4)
        at = span.stop
    assert at == len(ids)


def spans(trajectory: Trajectory) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    return [(span.first, span.stop, [*span.kv]) for span in trajectory.kv_spans]
