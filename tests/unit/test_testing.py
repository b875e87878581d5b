"""The stand-ins, the assertions and the guards that the other tests lean on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rankstep.testing import (
    Collective,
    DelayedCommunicator,
    FailingCommunicator,
    Outcome,
    RankFailure,
    RecordingCommunicator,
    Status,
    assert_bitwise_equal,
    assert_close_to,
    assert_in_order,
    assert_same_on_all,
)
from rankstep.testing._wire import pack, unpack

pytest_plugins = ["pytester"]

NAN = float("nan")


def peers_of_three(call):
    """Rank 0 puts in ones, rank 2 tens, and the call's index on top."""
    return [torch.full((2,), 1.0 + call), torch.full((2,), 10.0 + call)]


class TestRecordingCommunicator:
    def test_adds_the_other_ranks_and_records_calls_in_order(self):
        comm = RecordingCommunicator(3, 1, peers_of_three)
        tensor = comm.allocate(2, torch.float32, torch.device("cpu"))
        first = comm.all_reduce(tensor)
        assert tensor.tolist() == [11.0, 11.0]
        comm.broadcast(tensor, 2).wait()
        first.wait()
        assert tensor.tolist() == [11.0, 11.0]
        assert comm.calls == [
            Collective("all_reduce", 2, torch.float32),
            Collective("broadcast", 2, torch.float32, src=2),
        ]
        assert comm.events == ["start 0", "start 1", "wait 1", "wait 0"]

    def test_averages_when_asked(self):
        comm = RecordingCommunicator(2, averages=True)
        tensor = torch.full((1,), 3.0)
        comm.all_reduce(tensor).wait()
        assert tensor.item() == 1.5
        assert comm.averages

    def test_gathers_in_rank_order(self):
        comm = RecordingCommunicator(3, 1, peers_of_three)
        outputs = [torch.empty(2) for _ in range(3)]
        comm.all_gather(outputs, torch.full((2,), 5.0)).wait()
        assert [output[0].item() for output in outputs] == [1.0, 5.0, 10.0]

    def test_scatters_the_part_of_this_rank(self):
        comm = RecordingCommunicator(3, 1, peers_of_three)
        output = torch.empty(2)
        comm.reduce_scatter(output, [torch.full((2,), float(r)) for r in range(3)]).wait()
        assert output.tolist() == [12.0, 12.0]

    def test_peers_put_in_zeros_by_default(self):
        comm = RecordingCommunicator(2)
        tensor = torch.ones(3, dtype=torch.bfloat16)
        comm.all_reduce(tensor)
        comm.broadcast(tensor, 0)
        assert tensor.tolist() == [1.0, 1.0, 1.0]
        comm.broadcast(tensor, 1)
        assert tensor.tolist() == [0.0, 0.0, 0.0]

    def test_refuses_the_wrong_number_of_peers(self):
        comm = RecordingCommunicator(3, peers=lambda _: [torch.zeros(1)])
        with pytest.raises(AssertionError, match="1 tensors for 2 other ranks"):
            comm.all_reduce(torch.zeros(1))


class TestDelayedCommunicator:
    def test_results_arrive_when_released_or_waited_for(self):
        comm = DelayedCommunicator(RecordingCommunicator(3, 1, peers_of_three))
        first, second = torch.zeros(2), torch.zeros(2)
        pending = [comm.all_reduce(first), comm.all_reduce(second)]
        assert (first[0].item(), second[0].item()) == (0.0, 0.0)
        comm.release(1)
        assert (first[0].item(), second[0].item()) == (0.0, 13.0)
        for work in pending:
            work.wait()
        assert first[0].item() == 11.0
        assert comm.events == [
            *("start 0", "start 1", "finish 1"),
            *("wait 0", "finish 0", "wait 1"),
        ]

    @pytest.mark.parametrize("written", ["input", "output"])
    def test_finds_a_tensor_that_is_written_in_flight(self, written):
        comm = DelayedCommunicator(RecordingCommunicator(2))
        source, outputs = torch.ones(1), [torch.zeros(1), torch.zeros(1)]
        pending = comm.all_gather(outputs, source)
        (source if written == "input" else outputs[1]).add_(1)
        with pytest.raises(AssertionError, match="call 0: a tensor was written in flight"):
            pending.wait()

    def test_serves_all_collectives(self):
        comm = DelayedCommunicator(RecordingCommunicator(2))
        output = torch.empty(1).fill_(7.0)
        comm.reduce_scatter(output, [torch.ones(1), torch.ones(1)]).wait()
        comm.broadcast(output, 0).wait()
        assert output.item() == 1.0
        assert comm.allocate(2, torch.int64, torch.device("cpu")).tolist() == [0, 0]
        assert (comm.rank, comm.world_size, comm.host_waits) == (0, 2, True)
        assert comm.name == "DelayedCommunicator(recording)"


class TestFailingCommunicator:
    def test_fails_in_the_wait_of_one_call(self):
        inner = RecordingCommunicator(2)
        comm = FailingCommunicator(inner, at_call=1)
        comm.all_reduce(torch.zeros(1)).wait()
        pending = comm.all_reduce(torch.zeros(1))
        with pytest.raises(RuntimeError, match="Connection reset by peer"):
            pending.wait()
        comm.all_reduce(torch.zeros(1)).wait()
        assert len(inner.calls) == 2

    def test_fails_at_the_start_when_asked(self):
        comm = FailingCommunicator(
            RecordingCommunicator(2), at_call=0, error=ValueError("no"), on_wait=False
        )
        with pytest.raises(ValueError, match="no"):
            comm.broadcast(torch.zeros(1), 0)


class TestAsserts:
    def test_equal_bits_pass(self):
        value = {
            "a": torch.tensor([0.0, NAN]),
            "b": [1, "x", NAN, np.arange(3)],
            "c": torch.ones(0),
        }
        twin = {"a": torch.tensor([0.0, NAN]), "b": [1, "x", NAN, np.arange(3)], "c": torch.ones(0)}
        assert_bitwise_equal(value, twin)
        assert_same_on_all([value, twin, value])

    @pytest.mark.parametrize(
        ("left", "right", "says"),
        [
            (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), "1 of 2 elements, first 1"),
            (torch.ones(2), torch.ones(2, dtype=torch.float64), "float32 .* not torch.float64"),
            (torch.ones(2), torch.ones(1, 2), r"\(2,\), not .*\(1, 2\)"),
            ({"w": [torch.ones(1)]}, {"w": [torch.zeros(1)]}, r"\['w'\]\[0\]: 1 of 1 elements"),
            ({"w": 1}, {"v": 1}, "keys"),
            ([1], [1, 2], "length 1, not 2"),
            (1, 1.0, "int 1, not float 1.0"),
            (np.array([1]), np.array([2]), "first 0: 1, not 2"),
            (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), "1 of 1 elements"),
            (torch.tensor(True), torch.tensor(False), "True, not False"),
        ],
    )
    def test_the_first_difference_is_named(self, left, right, says):
        with pytest.raises(AssertionError, match=says):
            assert_bitwise_equal(left, right)

    def test_the_rank_that_differs_is_named(self):
        with pytest.raises(AssertionError, match=r"ranks 0 and 2 differ at \['w'\]"):
            assert_same_on_all([{"w": 1}, {"w": 1}, {"w": 2}])
        with pytest.raises(AssertionError, match="no values"):
            assert_same_on_all([])

    def test_closeness_is_judged_by_the_scale_of_the_tensor(self):
        want = {"w": torch.tensor([100.0, 1e-6]), "b": torch.tensor([NAN, torch.inf])}
        got = {"w": torch.tensor([100.0, 2e-6]), "b": torch.tensor([NAN, torch.inf])}
        assert_close_to(got, want, rel=1e-7)
        assert_close_to([torch.zeros(0), torch.zeros(1)], [torch.zeros(0), torch.zeros(1)], rel=0.0)

    def test_the_worst_element_of_all_is_named(self):
        want = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([10.0])}
        got = {"w": torch.tensor([1.0, 2.2]), "b": torch.tensor([10.1])}
        with pytest.raises(
            AssertionError, match=r"off by 0.1 .*\['w'\] element 1: 2.2.* instead of 2,"
        ):
            assert_close_to(got, want, rel=0.05)

    @pytest.mark.parametrize(
        ("got", "says"), [([NAN], "off by inf"), ([1.0, 2.0], "shape"), ([torch.inf], "off by inf")]
    )
    def test_what_cannot_be_compared_is_not_close(self, got, says):
        with pytest.raises(AssertionError, match=says):
            assert_close_to(torch.tensor(got), torch.tensor([1.0]), rel=1.0)
        with pytest.raises(AssertionError, match="nothing to compare"):
            assert_close_to([], [], rel=1.0)

    def test_events_may_have_others_between_them(self):
        assert_in_order(["a", "b", "c", "b"], "a", "c", "b")
        with pytest.raises(AssertionError, match="'a' does not follow"):
            assert_in_order(["a", "b"], "b", "a")


class TestOutcomes:
    def test_a_death_is_shown_before_the_errors_it_caused(self):
        raised = Outcome(0, Status.RAISED, error_type="RuntimeError", error="reset", ended_ns=1)
        died = Outcome(1, Status.DIED, error="its process ended", ended_ns=2)
        fine = Outcome(2, Status.OK, value=3)
        failure = RankFailure([raised, died, fine])
        assert str(failure).startswith("2 of 3 ranks failed (likely cause first: 1, 0)")
        assert failure.outcomes == (raised, died, fine)
        assert str(fine) == "rank 2 ok: 3"


class TestWire:
    def test_one_tensor_sent_twice_stays_one(self):
        tensor = torch.ones(2, requires_grad=True)
        first, second = unpack(pack([tensor, tensor]))
        assert first is second
        assert first.requires_grad

    def test_a_local_class_is_refused(self):
        class Local:
            pass

        with pytest.raises(TypeError, match="top level of a module"):
            pack(Local())


def test_the_guards_fail_a_test_for_what_it_leaves(pytester):
    """Each of these leaks one thing; the last leaks nothing, so that nothing spills over."""
    conftest = Path(__file__).parents[1] / "conftest.py"
    pytester.makeconftest(conftest.read_text("utf-8"))
    pytester.makepyfile(
        """
        import os, random, socket, subprocess, tempfile, threading
        import torch, torch.distributed as dist

        kept = []

        def test_variable():
            os.environ["RANKSTEP_LEFT"] = "1"

        def test_group():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

        def test_thread():
            kept.append(threading.Event())
            threading.Thread(target=kept[-1].wait, args=(8,), name="left").start()

        def test_process():
            kept[-1].set()
            kept.append(subprocess.Popen(["sleep", "8"]))

        def test_port():
            kept[-1].kill()
            kept[-1].wait()
            kept.append(socket.create_server(("127.0.0.1", 0)))

        def test_file():
            kept[-1].close()
            kept.append(tempfile.NamedTemporaryFile(prefix="rankstep-"))

        def test_nothing(monkeypatch, tmp_path):
            kept[-1].close()
            monkeypatch.setenv("RANKSTEP_LEFT", "1")
            (tmp_path / "rankstep-file").touch()
            assert not dist.is_initialized()

        def test_seeds():
            kept.append((random.random(), torch.rand(1).item()))

        def test_seeds_again():
            assert kept[-1] == (random.random(), torch.rand(1).item())
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=9, errors=6)
    result.stdout.fnmatch_lines(
        [
            "*left behind: environment variable RANKSTEP_LEFT",
            "*left behind: an open process group",
            "*left behind: threads left (*)",
            "*left behind: processes sleep (*)",
            "*left behind: ports *",
            "*left behind: files rankstep-*",
        ]
    )
