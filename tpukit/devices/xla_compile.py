"""A function whose every call is one compiled graph on an XLA device."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch_xla
from torch import Tensor, nn
from torch.optim import Optimizer

from tpukit.devices import recompiles
from tpukit.devices.recompiles import UnexpectedRecompilation
from tpukit.devices.xla_replay import GraphReplay

if TYPE_CHECKING:
    from tpukit.devices.xla import XLARuntime

GUARDED_CALLS = 3


class CompiledFunction:
    """`function` as one compiled graph per call, with at most `max_graphs` different graphs.

    A call that needs one graph more raises UnexpectedRecompilation with its causes. What was compiled, and
    why, is added to the runtime's compile events. mutates: see `Runtime.compile`."""

    calls = 0
    graphs = 0  # compiled so far, without those of the replay
    replay: GraphReplay | None = None

    def __init__(
        self,
        function: Callable,
        name: str,
        max_graphs: int,
        runtime: "XLARuntime",
        mutates: tuple[nn.Module, Optimizer] | None,
    ):
        self.function, self.name, self.max_graphs, self.runtime = function, name, max_graphs, runtime
        self.mutates = mutates
        self.parameter_names = tuple(inspect.signature(function).parameters)
        # The keywords of a partial: another number makes another partial, of the same name.
        keywords = getattr(inspect.unwrap(function), "keywords", {})
        self.bound = {name: value for name, value in keywords.items() if not isinstance(value, Tensor)}
        if not self.bound:
            runtime.last_signatures.pop(name, None)  # of another function with this name
        # An all-reduce on the host cuts the step into two graphs, which cannot be replayed or counted.
        self.is_one_graph = not runtime.reduces_on_the_host
        if mutates and self.is_one_graph:
            self.replay = GraphReplay(function, name, *mutates, runtime)

    def __call__(self, *arguments) -> Any:
        signature = recompiles.signature(self.parameter_names, arguments, self.mutates) | self.bound
        before, refusal = self.runtime.compilations(), None
        try:
            return self._call(arguments, signature)
        except UnexpectedRecompilation as error:
            refusal = error
            raise
        finally:
            self._record(signature, before, refusal)

    def _record(self, signature, before, refusal):
        """Keep what this call was made with, and an event where it compiled, or was refused."""
        last = self.runtime.last_signatures.get(self.name)
        self.runtime.last_signatures[self.name] = signature
        graphs, seconds = (after - earlier for earlier, after in zip(before, self.runtime.compilations()))
        if not graphs and refusal is None:
            return
        causes = recompiles.differences(last, signature) if last else []
        if refusal is not None:
            refusal.causes = tuple(causes)
            if operation := refusal.args[3]:
                causes.append(f"first new operation: {operation}")
        self.runtime.record_compilation(self.name, graphs, seconds, causes, refused=refusal is not None)

    def _call(self, arguments, signature):
        self.calls += 1
        if self.replay is not None and self.replay.may_replay:
            return self.replay(arguments, signature)
        before, _ = self.runtime.compilations()
        # full_graph: a hidden `.item()` raises instead of cutting the step. It also makes the host wait for
        # the device before it traces the next step, so only the first calls are guarded.
        if self.calls <= GUARDED_CALLS and self.is_one_graph:
            result = torch_xla.compile(self.function, full_graph=True, name=self.name)(*arguments)
        else:
            result = self.function(*arguments)
            torch_xla.sync()
        compiled = self.runtime.compilations()[0] - before
        # The first call has one graph, even if this process had compiled it before, or also compiled what was
        # pending.
        self.graphs = self.graphs + compiled if self.graphs else 1
        if self.graphs > self.max_graphs and self.is_one_graph:
            raise UnexpectedRecompilation(self.name, self.calls, self.max_graphs, None)
        return result
