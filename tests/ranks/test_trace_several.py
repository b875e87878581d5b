"""Several wrappers recorded on real ranks: a generator and its critic, a wrapper inside another, two losses."""

from __future__ import annotations

import torch

import rankstep
from rankstep.trace import record
from rankstep.trace.files import load
from rankstep.trace.summary import summarize


class Critic(torch.nn.Module):
    """Judges what it is given."""

    def __init__(self):
        super().__init__()
        self.judge = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))

    def forward(self, x):
        return self.judge(x)


class Maker(torch.nn.Linear):
    """Makes what is judged."""


def adversaries(rank, folder):
    torch.manual_seed(0)
    critic = rankstep.DistributedDataParallel(Critic())
    maker = rankstep.DistributedDataParallel(Maker(4, 4))
    steppers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (critic, maker)]
    with record(folder):
        for _ in range(3):
            noise = torch.randn(8, 4)
            critic.zero_grad()
            (critic(maker(noise).detach()).mean() - critic(noise).mean()).backward()
            steppers[0].step()
            maker.zero_grad()
            critic(maker(noise)).mean().backward()
            steppers[1].step()


def nested(rank, folder):
    """A wrapper inside a wrapper's module, and a second loss with a backward of its own."""
    torch.manual_seed(0)
    inner = rankstep.DistributedDataParallel(torch.nn.Linear(4, 4))

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 4)
            self.second = torch.nn.Linear(4, 2)
            self._inner = [inner]  # no submodule: each wrapper reduces its own

        def forward(self, x):
            x = self._inner[0](self.first(x))
            return self.second(x), x

    outer = rankstep.DistributedDataParallel(Outer())
    with record(folder):
        for _ in range(2):
            one, two = outer(torch.ones(3, 4))
            one.sum().backward(retain_graph=True)
            two.sum().backward()


def test_a_generator_through_its_discriminator(ranks, tmp_path):
    ranks(2).run(adversaries, tmp_path)
    trace = load(tmp_path)
    for rank in trace.ranks:
        assert rank.wrappers == ("Critic", "Maker")
        assert [step.wrappers for step in rank.steps] == [(0,), (0, 1)] * 3
        assert [step.number for step in rank.steps] == list(range(6))
    assert [(kind.name, kind.steps) for kind in summarize(trace).kinds] == [
        ("Critic", 2),
        ("Critic + Maker", 2),
    ]


def test_a_wrapper_inside_another_and_two_losses(ranks, tmp_path):
    ranks(2).run(nested, tmp_path)
    trace = load(tmp_path)
    for rank in trace.ranks:
        assert [step.wrappers for step in rank.steps] == [(0, 1)] * 4
        # The second backward of an iteration has no forward before it.
        kinds = [{s.kind.value for s in step.spans} for step in rank.steps]
        assert ["forward" in each for each in kinds] == [True, False] * 2
