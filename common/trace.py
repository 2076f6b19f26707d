"""What a model's layers hand on, small enough to compare between two programs: random projections of the residual stream."""
import torch

WIDTH = 16                        # projections of a token's state; two states that differ by e give about e in each


class Trace:
    """Watch `layers` {number: module} until `stop`. `stream` makes (tokens, hidden) of what such a module returns."""

    def __init__(self, layers, stream):
        self.found, self.stream = {}, stream
        self.hooks = [module.register_forward_hook(self._hook(number)) for number, module in layers.items()]

    def _hook(self, number):
        def hook(module, args, output):
            state = self.stream(output).detach().float()
            g = torch.Generator().manual_seed(0)
            project = torch.randn(state.shape[-1], WIDTH, generator=g).to(state.device) / WIDTH ** 0.5
            self.found.setdefault(number, []).append((state @ project).cpu())           # a prefill may come in pieces
        return hook

    def stop(self):
        """{layer: (tokens, WIDTH) as nested lists}; empty where the modules ran compiled, which leaves hooks out."""
        for hook in self.hooks:
            hook.remove()
        return {number: torch.cat(parts).tolist() for number, parts in self.found.items()}
