"""A step of a backward in which anything may happen."""

import torch


class Trip(torch.autograd.Function):
    """Passes values on; in backward does what it was told first."""

    @staticmethod
    def forward(ctx, x, action):
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.action is not None:
            ctx.action()
        return grad, None
