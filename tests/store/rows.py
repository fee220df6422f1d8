"""Trajectories for tests: any that hypothesis can think of, and plain ones."""

import struct
from typing import Any

from hypothesis import strategies as st

from rollout.types import (
    AbortReason,
    Attempt,
    FinishReason,
    GroupId,
    KVSpan,
    Resume,
    Trajectory,
    TrajectoryId,
    Version,
    VersionRun,
    WorkerId,
    version_runs,
)

INT32 = st.integers(0, 2**31 - 1)
WORKERS = st.text(max_size=5).map(WorkerId)
TIMES = st.floats(0, 4e9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    tokens = draw(st.integers(0, 12))
    version = st.none() | st.integers(-(2**63), 2**63 - 1).map(Version)
    versions = draw(st.lists(version, min_size=tokens, max_size=tokens))
    logprobs = st.floats(max_value=0.0, allow_nan=False, width=32)
    attempt = st.builds(
        Attempt,
        seed=st.integers(0, 2**64 - 1),
        output_ids=st.lists(INT32, max_size=3).map(tuple),
        logprobs=st.lists(logprobs, max_size=3).map(tuple),
        versions=st.lists(version, max_size=3).map(version_runs),
        reason=st.none() | st.sampled_from(AbortReason),
        error=st.none() | st.text(),
    )
    resume = st.builds(
        Resume,
        worker=WORKERS,
        cached_tokens=INT32,
        loaded_tokens=INT32,
        restored_tokens=INT32,
        recomputed_tokens=INT32,
    )
    run = st.tuples(INT32, INT32, st.integers(-(2**63), 2**63 - 1).map(Version))
    span = st.builds(KVSpan, first=INT32, stop=INT32, kv=st.lists(run, max_size=2).map(tuple))
    return Trajectory(
        trajectory_id=TrajectoryId(draw(st.text())),
        group_id=GroupId(draw(st.text())),
        sample_index=draw(INT32),
        seed=draw(st.integers(0, 2**64 - 1)),
        prompt_ids=tuple(draw(st.lists(INT32, max_size=5))),
        output_ids=tuple(draw(st.lists(INT32, min_size=tokens, max_size=tokens))),
        logprobs=tuple(draw(st.lists(logprobs, min_size=tokens, max_size=tokens))),
        versions=version_runs(versions),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        error=draw(st.none() | st.text()),
        suspensions=draw(INT32),
        workers=tuple(draw(st.lists(WORKERS, max_size=3))),
        resumes=tuple(draw(st.lists(resume, max_size=3))),
        submitted_at=draw(TIMES),
        finished_at=draw(st.none() | TIMES),
        metadata=draw(st.dictionaries(st.text(), JSON, max_size=3)),
        abort_reason=draw(st.none() | st.sampled_from(AbortReason)),
        attempts=tuple(draw(st.lists(attempt, max_size=2))),
        kv_spans=tuple(draw(st.lists(span, max_size=2))),
    )


def trajectory(index: int = 0, *, tokens: int = 3, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "trajectory_id": TrajectoryId(f"g/{index}"),
        "group_id": GroupId("g"),
        "sample_index": index,
        "seed": 2**64 - 1 - index,
        "prompt_ids": (1, 2),
        "output_ids": tuple(range(tokens)),
        "logprobs": (-0.5,) * tokens,
        "versions": (VersionRun(version=Version(0), tokens=tokens),) if tokens else (),
        "finish_reason": FinishReason.LENGTH,
    }
    return Trajectory(**values | changes)


LOGPROB_BITS = [0x80000000, 0x80000001, 0xBEAAAAAB, 0xBF7FFFFF, 0xFF7FFFFF, 0xFF800000]
"""-0, the least denormal, two without an exact decimal, the least finite one, -inf."""
LOGPROBS = struct.unpack("<6f", struct.pack("<6I", *LOGPROB_BITS))
SEED = 2**64 - 3

FULL = trajectory(
    0,
    tokens=6,
    seed=SEED,
    prompt_ids=(5, 2**31 - 1),
    output_ids=(9, 8, 7, 6, 5, 4),
    logprobs=LOGPROBS,
    versions=tuple(VersionRun(version=version, tokens=2) for version in (Version(3), None, Version(4))),
    finish_reason=FinishReason.ABORT,
    abort_reason=AbortReason.OVER_LONG,
    workers=(WorkerId("w0"), WorkerId("w1")),
    resumes=(Resume(worker=WorkerId("w1"), cached_tokens=1, loaded_tokens=2, restored_tokens=3, recomputed_tokens=4),),
    attempts=(
        Attempt(
            seed=2**63,
            output_ids=(1,),
            logprobs=LOGPROBS[2:3],
            versions=(VersionRun(version=Version(2), tokens=1),),
            reason=None,
            error="lost",
        ),
    ),
    kv_spans=(KVSpan(first=2, stop=8, kv=((0, 1, Version(3)), (1, 2, Version(4)))),),
    submitted_at=1.5,
    finished_at=2.25,
    suspensions=2,
    error="lost, too",
    metadata={"answer": "häh"},
)
"""One that says something in every field."""
