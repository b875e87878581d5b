"""What ``rankstep explain`` must find with the built-in job: computed anew by plain PyTorch, in one process.

Nothing of Rankstep computes here but the built-in job itself: samples are dealt by torch's sampler, ranks are copies of the
model in a list, and averages are taken over that list.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import os
import sys

import pytest
import torch
from torch.utils.data import DistributedSampler

from rankstep import __version__
from rankstep.explain.builtin import digits
from rankstep.explain.claims import judge

EXACT = 64 * torch.finfo(torch.float32).eps
SHOWN, MAPPED = 5, 40


def near(value, rel=1e-3):
    """Sums in another order are near, and a few steps of training widen that."""
    return pytest.approx(value, rel=rel, abs=1e-12)


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def sha(tensors):
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors))


def degrees(a, b):
    return math.degrees(math.acos(float(a @ b) / float(a.norm() * b.norm())))


class Oracle:
    """The built-in job on so many pretended ranks."""

    def __init__(self, ranks, steps, seed=0):
        torch.manual_seed(seed)
        self.ranks, self.steps, self.seed = ranks, steps, seed
        self.job = digits()
        self.base = self.job.model.train()
        self.params = list(self.base.parameters())
        self.names = [name for name, _ in self.base.named_parameters()]
        self.size = self.job.batch_size
        self.dealt = [self.deal(rank, 0, drop_last=True) for rank in range(ranks)]
        self.mine = [self.gradient(self.base, self.batch(rank, 0)) for rank in range(ranks)]
        self.mean = sum(gradient for _, gradient in self.mine) / ranks
        self.one = self.gradient(self.base, self.whole(0))
        self.length = float(flat(self.params).norm())
        self.rate = 0.01 * self.length / float(self.one[1].norm())
        self.drifted = self._drift()
        self.averaged = self._averaging()
        self.stepped = self._steps()

    def deal(self, rank, epoch, *, drop_last=False):
        sampler = DistributedSampler(
            self.job.dataset, self.ranks, rank, seed=self.seed, drop_last=drop_last
        )
        sampler.set_epoch(epoch)
        return list(sampler)

    def batch(self, rank, step):
        return self.dealt[rank][step * self.size : (step + 1) * self.size]

    def whole(self, step):
        return [index for rank in range(self.ranks) for index in self.batch(rank, step)]

    def loss(self, model, indices):
        return self.job.loss(model, self.job.dataset[indices])

    def gradient(self, model, indices):
        model.zero_grad()
        loss = self.loss(model, indices)
        loss.backward()
        return loss.item(), flat([param.grad for param in model.parameters()])

    def copies(self, make):
        models = [copy.deepcopy(self.base) for _ in range(self.ranks)]
        return models, [make(list(model.parameters())) for model in models]

    def sgd(self, params):
        return torch.optim.SGD(params, lr=self.rate)

    def train(self, make, steps, *, gradients=False, every=0):
        """Train all copies; give the weights after each step, and the optimizers' states in the end."""
        models, optimizers = self.copies(make)
        after, losses = [], []
        for step in range(steps):
            for rank, model in enumerate(models):
                losses.append(self.gradient(model, self.batch(rank, step))[0])
            if gradients:
                average([[param.grad for param in model.parameters()] for model in models])
            for optimizer in optimizers:
                optimizer.step()
            if every and (step + 1) % every == 0:
                average([[param.data for param in model.parameters()] for model in models])
            after.append([flat(model.parameters()) for model in models])
        return after, [state_of(optimizer) for optimizer in optimizers], losses

    def _drift(self):
        after, _, _ = self.train(self.sgd, self.steps)
        return [max(float((one - row[0]).norm()) for one in row) for row in after]

    def _averaging(self):
        every = max(2, self.steps // 2)
        rounds = self.steps // every * every
        start = flat(self.params)
        makes = {
            "SGD": self.sgd,
            "SGD momentum=0.9": lambda p: torch.optim.SGD(p, lr=self.rate / 4, momentum=0.9),
            "Adam": torch.optim.Adam,
            "AdamW": torch.optim.AdamW,
            "AdamW (job)": self.job.optimizer,
        }
        rows = {}
        for name, make in makes.items():
            right = self.train(make, rounds, gradients=True)[0][-1][0]
            each, states, _ = self.train(make, rounds, every=1)
            few = self.train(make, rounds, every=every)[0][-1][0]
            apart = [float((state - states[0]).norm()) for state in states if state is not None]
            rows[name] = (
                float((right - start).norm()),
                float((right - each[-1][0]).norm()),
                float((right - few).norm()),
                max(apart) / float(states[0].norm()) if apart else None,
            )
        return rounds, every, rows

    def _steps(self):
        _, _, losses = self.train(self.job.optimizer, self.steps, gradients=True)
        single = copy.deepcopy(self.base)
        optimizer = self.job.optimizer(list(single.parameters()))
        alone = []
        for step in range(self.steps):
            alone.append(self.gradient(single, self.whole(step))[0])
            optimizer.step()
        moved = float((flat(single.parameters()) - flat(self.params)).norm())
        rows = [losses[i : i + self.ranks] for i in range(0, len(losses), self.ranks)]
        return rows, alone, moved


def average(parts):
    """Put the mean of the ranks' tensors in place of each of them."""
    for tensors in zip(*parts, strict=True):
        mean = sum(tensors) / len(tensors)
        for tensor in tensors:
            tensor.copy_(mean)


def state_of(optimizer):
    parts = [
        value
        for group in optimizer.param_groups
        for param in group["params"]
        for value in optimizer.state.get(param, {}).values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]
    return flat(parts) if parts else None


# ---------------------------------------------------------------- one check for each part


def check_world(facts, oracle):
    world = facts["world"]
    ranks, count = world["ranks"], oracle.ranks
    numel = sum(param.numel() for param in oracle.params)
    assert world["world_size"] == world["ranks_per_node"] == len(ranks) == count
    assert (world["nodes"], world["backend"], world["model"]) == (1, "gloo", "Sequential")
    assert world["tensors"] == world["trained_tensors"] == len(oracle.params)
    assert world["trained_parameters"] == numel
    assert world["parameter_bytes_of_all_ranks"] == 4 * numel * count
    assert world["optimizer"] == "AdamW"
    pids = {rank["pid"] for rank in ranks}
    assert len(pids) == count
    assert os.getpid() not in pids
    for number, rank in enumerate(ranks):
        assert (rank["node"], rank["local_rank"], rank["rank"]) == (0, number, number)
        assert (rank["device"], rank["threads"], rank["buffer_bytes"]) == ("cpu", 1, 0)
        assert rank["pid"] > 0
        assert rank["parameters"] == numel
        assert rank["parameter_bytes"] == rank["gradient_bytes"] == 4 * numel
        # Two moments for each weight, and one counter for each tensor.
        assert rank["optimizer_bytes"] == 8 * numel + 4 * len(oracle.params)
        others = [param * (1 + number) + number for param in oracle.params]
        assert rank["digest_before"] == sha(others).hexdigest()
        assert rank["digest_after"] == sha(oracle.params).hexdigest()
    check_second_world(world["two_nodes"])


def check_second_world(second):
    assert (second["nodes"], second["ranks_per_node"], second["problem"]) == (2, 2, None)
    assert second["seconds"] > 0
    # Local ranks begin anew on each node, ranks do not.
    places = [[0, 0, 0], [0, 1, 1], [1, 0, 2], [1, 1, 3]]
    ranks = second["ranks"]
    assert [[rank["node"], rank["local_rank"], rank["rank"]] for rank in ranks] == places
    assert [rank["heard"] for rank in ranks] == [places] * 4
    assert [rank["world_size"] for rank in ranks] == [4] * 4
    first, same, other, same_as_other = (rank["launcher"] for rank in ranks)
    assert first == same != other == same_as_other


def check_samples(facts, oracle):
    samples, ranks = facts["samples"], facts["samples"]["ranks"]
    length, count = len(oracle.job.dataset), oracle.ranks
    share = -(-length // count)
    assert samples["dataset"] == type(oracle.job.dataset).__name__
    assert samples["dataset_samples"] == samples["counted_samples"] == samples["dealt"] == length
    assert (samples["dealt_least"], samples["dealt_most"]) == (1, 1)
    extra = share * count - length
    assert samples["padded_dealt"] == share * count
    assert samples["padded_twice"] == extra
    assert (samples["padded_least"], samples["padded_most"]) == (1, 2 if extra else 1)
    assert samples["without_sampler_reads"] == length * count
    assert samples["warning"].startswith("rank 0: ")
    assert "set_epoch(epoch)" in samples["warning"]
    for number, rank in enumerate(ranks):
        first, second = oracle.deal(number, 0), oracle.deal(number, 1)
        assert rank["samples"] == len(range(number, length, count))
        assert rank["samples_padded"] == rank["places"] == share
        assert rank["epoch_0"] == rank["epoch_1_without_set_epoch"] == first[:SHOWN]
        assert rank["epoch_1"] == second[:SHOWN]
        assert rank["same_places_without_set_epoch"] == share
        same = sum(a == b for a, b in zip(first, second, strict=True))
        assert rank["same_places_with_set_epoch"] == same
    for epoch in (0, 1):
        generator = torch.Generator().manual_seed(oracle.seed + epoch)
        order = torch.randperm(length, generator=generator).tolist()
        owner = {sample: place % count for place, sample in enumerate(order)}
        assert samples[f"owners_epoch_{epoch}"] == [owner[sample] for sample in range(MAPPED)]


def check_gradients(facts, oracle):
    gradients, count = facts["gradients"], oracle.ranks
    vectors, mean = [gradient for _, gradient in oracle.mine], oracle.mean
    one_loss, one = oracle.one
    place = int(mean.abs().argmax())
    assert gradients["local_batch"] == oracle.size
    assert gradients["global_batch"] == oracle.size * count
    for number, rank in enumerate(gradients["ranks"]):
        assert rank["samples"] == oracle.batch(number, 0)
        assert rank["loss"] == near(oracle.mine[number][0])
        assert rank["length"] == near(float(vectors[number].norm()))
        assert rank["angle_to_mean"] == near(degrees(vectors[number], mean))
        assert rank["element"] == near(float(vectors[number][place]))
    angles = [degrees(a, b) for a, b in itertools.combinations(vectors, 2)]
    assert gradients["smallest_angle"] == near(min(angles))
    assert gradients["largest_angle"] == near(max(angles))
    assert gradients["mean_length"] == near(float(mean.norm()))
    assert gradients["one_process_loss"] == near(one_loss)
    assert gradients["one_process_length"] == near(float(one.norm()))
    assert gradients["tolerance"] == EXACT
    assert 0 <= gradients["difference_relative"] <= EXACT
    assert 0 <= gradients["wrapper_difference_relative"] <= EXACT
    share = gradients["difference"] / gradients["one_process_length"]
    assert gradients["difference_relative"] == near(share)
    name, first = next(
        (name, start)
        for name, start, end in spans(oracle.names, oracle.params)
        if start <= place < end
    )
    assert gradients["element_name"] == f"{name}[{place - first}]"
    for key in ("element_mean", "element_one_process", "element_wrapper"):
        assert gradients[key] == near(float(mean[place]))
    assert gradients["causes"] == []
    check_uneven(gradients, oracle)


def spans(names, params):
    ends = list(itertools.accumulate(param.numel() for param in params))
    return zip(names, [0, *ends], ends, strict=False)


def check_uneven(gradients, oracle):
    uneven, count = gradients["uneven"], oracle.ranks
    sizes = [oracle.size * (rank + 1) // count for rank in range(count)]
    assert uneven["sizes"] == sizes
    parts = [oracle.batch(rank, 0)[:size] for rank, size in enumerate(sizes)]
    found = [oracle.gradient(oracle.base, part) for part in parts]
    one = oracle.gradient(oracle.base, list(itertools.chain(*parts)))[1]
    means = sum(gradient for _, gradient in found) / count
    assert uneven["mean_of_means_relative"] == near(float((means - one).norm() / one.norm()))
    assert uneven["mean_of_means_relative"] > 100 * EXACT
    assert 0 <= uneven["exact_relative"] <= EXACT
    for rank, size, (loss, _) in zip(gradients["ranks"], sizes, found, strict=True):
        assert rank["uneven"] == {"samples": size, "loss": near(loss)}


def check_drift(facts, oracle):
    drift = facts["drift"]
    assert drift["steps"] == oracle.steps
    assert drift["rate"] == near(oracle.rate)
    assert drift["weights_length"] == near(oracle.length)
    assert drift["alone"] == near(oracle.drifted)
    assert drift["alone_relative"] == near([apart / oracle.length for apart in oracle.drifted])
    assert drift["alone_checksums"] == [oracle.ranks] * oracle.steps
    assert drift["together"] == [0.0] * oracle.steps
    assert drift["together_checksums"] == [1] * oracle.steps


def check_averaging(facts, oracle):
    averaging = facts["averaging"]
    rounds, every, rows = oracle.averaged
    assert (averaging["steps"], averaging["every"]) == (rounds, every)
    assert [row["optimizer"] for row in averaging["optimizers"]] == list(rows)
    for row in averaging["optimizers"]:
        moved, each, few, states = rows[row["optimizer"]]
        assert row["moved"] == near(moved)
        assert row["apart_every_few"] == near(few, 5e-3)
        assert row["apart_every_few_relative"] == near(few / moved, 5e-3)
        assert row["states_apart_relative"] == (states if states is None else near(states, 5e-3))
        share = row["apart_every_step"] / row["moved"]
        assert row["apart_every_step_relative"] == near(share)
        if row["optimizer"].startswith("SGD"):
            assert 0 <= share < 1e-4
        else:
            assert share > 0.05
            assert row["apart_every_step"] == near(each, 5e-3)


def check_backward(facts, oracle):
    backward = facts["backward"]
    sizes = {name: 4 * p.numel() for name, p in zip(oracle.names, oracle.params, strict=True)}
    assert sorted(backward["names"]) == sorted(oracle.names)
    assert backward["bytes"] == [sizes[name] for name in backward["names"]]
    cap = sum(sizes.values()) / 4
    assert backward["bucket_cap_mb"] * 2**20 == near(cap, 1e-9)
    plan = backward["plan"]
    assert [bucket["bucket"] for bucket in plan] == list(range(len(plan)))
    everything = sorted(param for bucket in plan for param in bucket["params"])
    assert everything == list(range(len(oracle.names)))
    for bucket in plan:
        held = [backward["bytes"][param] for param in bucket["params"]]
        assert bucket["bytes"] == sum(held)
        # It is full as soon as it holds so much; the last one may not be.
        assert sum(held[:-1]) < cap
        assert sum(held) >= cap or bucket is plan[-1]
    assert backward["all_reduces"] == len(plan) >= 3
    assert 1 <= backward["launched_in_backward"] < len(plan)
    assert backward["recorded"] == 5
    assert min(rank["began"] for rank in backward["ranks"]) == 0
    for rank in backward["ranks"]:
        check_one_backward(rank, plan, backward["launched_in_backward"])


def check_one_backward(rank, plan, early):
    ready = {event["param"]: event["at"] for event in rank["ready"]}
    assert len(ready) == len(rank["ready"]) == sum(len(bucket["params"]) for bucket in plan)
    assert list(ready.values()) == sorted(ready.values())
    # Backward begins at the loss: the last layer's gradients are there before the first layer's.
    assert list(ready).index(len(ready) - 1) < list(ready).index(0)
    begins, ends = zip(rank["forward"], rank["backward"], rank["step"], strict=True)
    assert begins == (0.0, *ends[:-1])
    assert list(ends) == sorted(ends)
    assert ends[0] <= min(ready.values()) <= max(ready.values()) <= ends[1]
    assert 0 <= rank["began"] < 1e8
    assert [bucket["bucket"] for bucket in rank["buckets"]] == list(range(len(plan)))
    assert sum(bucket["in_backward"] for bucket in rank["buckets"]) == early
    launched = -math.inf
    for bucket, planned in zip(rank["buckets"], plan, strict=True):
        last = max(ready[param] for param in planned["params"])
        assert last <= bucket["filled"] <= bucket["launched"] <= bucket["finished"]
        assert launched <= bucket["launched"] <= bucket["waited"][1] <= ends[1]
        assert bucket["launched"] <= bucket["waited"][0] <= bucket["waited"][1]
        assert bucket["finished"] <= ends[1] + 1e6
        launched = bucket["launched"]
    check_overlap(rank, max(ready.values()))


def check_overlap(rank, last):
    """Go through all moments at which something changes, and add up what lies between them."""
    flights = [(bucket["launched"], bucket["finished"]) for bucket in rank["buckets"]]
    moments = sorted({last, *itertools.chain(*flights)})
    hidden = exposed = 0.0
    for begin, end in itertools.pairwise(moments):
        if any(launched <= begin and end <= finished for launched, finished in flights):
            hidden += (end - begin) * (end <= last)
            exposed += (end - begin) * (end > last)
    overlap = rank["overlap"]
    assert overlap["last_ready"] == last
    assert overlap["in_flight"] == near(hidden + exposed, 1e-9)
    assert overlap["hidden"] == near(hidden, 1e-9)
    assert overlap["exposed"] == near(exposed, 1e-9)
    assert overlap["hidden_share"] == near(hidden / (hidden + exposed), 1e-9)


def check_whatif(facts, oracle, tensors):
    whatif, buckets = facts["whatif"], len(facts["backward"]["plan"])
    assert whatif["way"].startswith(("shared memory", "sockets", "gloo"))
    job, many = whatif["job"], whatif["many"]
    numel = sum(param.numel() for param in oracle.params)
    assert (job["tensors"], job["bytes"]) == (len(oracle.params), 4 * numel)
    assert job["bucket_cap_mb"] == facts["backward"]["bucket_cap_mb"]
    assert (many["tensors"], many["elements"], many["bytes"]) == (tensors, 1, 4 * tensors)
    assert many["bucket_cap_mb"] * 2**20 == near(tensors, 1e-9)
    of_many = -(-tensors // (tensors // 4))
    for found, planned in ((job, buckets), (many, of_many)):
        counts = {way["way"]: way["all_reduces"] for way in found["ways"]}
        assert counts == {
            "per_parameter": found["tensors"],
            "after_backward": planned,
            "one_bucket": 1,
            "plan": planned,
        }
        for way in found["ways"]:
            assert way["tensors"] == found["tensors"]
            assert 0 <= way["difference_relative"] <= EXACT
            least, most = way["milliseconds_least"], way["milliseconds_most"]
            assert 0 < least <= way["milliseconds"] <= most < 1e6
            single = found is many and way["way"] == "per_parameter"
            assert way["repeats"] == (1 if single else 3 if found is many else 5)


def check_steps(facts, oracle):
    steps = facts["steps"]
    losses, alone, moved = oracle.stepped
    assert (steps["steps"], steps["optimizer"]) == (oracle.steps, "AdamW")
    for row, expected in zip(steps["rows"], losses, strict=True):
        assert row["losses"] == near(expected)
        assert row["loss"] == near(sum(expected) / len(expected))
        assert row["checksums"] == 1
    assert steps["state_checksums"] == 1
    assert len({rank["digest"] for rank in steps["ranks"]}) == 1
    assert len(steps["ranks"]) == oracle.ranks
    assert steps["one_process_losses"] == near(alone)
    assert steps["one_process_moved"] == near(moved)
    share = steps["one_process_apart"] / steps["one_process_moved"]
    assert steps["one_process_apart_relative"] == near(share)
    assert 0 <= share < 1e-3


def check_frame(facts, oracle):
    assert (facts["schema"], facts["seed"], facts["cores"]) == (1, oracle.seed, os.cpu_count())
    versions = (facts["rankstep"], facts["torch"], facts["python"])
    assert versions == (__version__, torch.__version__, sys.version.split()[0])
    job = facts["job"]
    assert (job["name"], job["built_in"], job["batch_size"]) == ("digits", True, oracle.size)
    assert 0 < job["step_seconds"] < 1e3
    seconds = dict(facts["seconds"])
    command, whole = seconds.pop("command"), seconds.pop("all")
    assert all(spent > 0 for spent in seconds.values())
    assert sum(seconds.values()) <= whole < command < 1e4
    assert judge(facts) == facts["claims"]
    assert facts["held"] is all(claim["held"] for claim in facts["claims"])


def check(facts, oracle, tensors):
    """See that every number is what it must be."""
    check_frame(facts, oracle)
    check_world(facts, oracle)
    check_samples(facts, oracle)
    check_gradients(facts, oracle)
    check_drift(facts, oracle)
    check_averaging(facts, oracle)
    check_backward(facts, oracle)
    check_whatif(facts, oracle, tensors)
    check_steps(facts, oracle)
