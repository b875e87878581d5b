"""Holistic Trace Analysis opens what we export and finds the same overlap in it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from trace_samples import two_ranks

from rankstep.trace import chrome, overlap

# In a process of its own: it brings pandas and plotly, and warns while it loads.
PROGRAM = """
import json, sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
shares = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
spent = analysis.get_temporal_breakdown(visualize=False).set_index("rank")["compute_time(us)"]
print(json.dumps({
    "ranks": sorted(analysis.t.get_all_traces()),
    "steps": [int(step) for step in analysis.get_profiler_steps()],
    "overlap": {int(rank): float(share) for rank, share in shares.items()},
    "compute_us": {int(rank): float(us) for rank, us in spent.items()},
    "kernels": sorted(analysis.get_gpu_kernel_breakdown(visualize=False)[0]["kernel_type"]),
}))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("hta") is None,
    reason="needs HolisticTraceAnalysis: pip install HolisticTraceAnalysis",
)
def test_hta_finds_the_same_overlap(tmp_path):
    trace = two_ranks(1, 2, 3)
    for name, text in chrome.export_ranks(trace).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == [0, 1]
    # It leaves out the last step, which a profiler may have cut.
    assert found["steps"] == [1, 2]
    steps = {rank.rank: rank.steps[0] for rank in trace.ranks}
    started = overlap.starts(steps.values())
    for rank, step in steps.items():
        # All steps of the sample are alike.
        share = overlap.parts(step, started).hidden_share
        assert found["overlap"][str(rank)] == pytest.approx(100 * share, abs=0.01)
    assert {"COMMUNICATION", "COMPUTATION"} <= set(found["kernels"])
    assert all(us > 0 for us in found["compute_us"].values())
