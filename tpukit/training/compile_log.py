"""What was compiled in a training, printed while it happens and kept in the run's records."""

import contextlib

from tpukit.runs.run import LONG_COMPILE_S


class CompileLog:
    """The compilations of a training's compiled functions."""

    def __init__(self, runtime, run):
        self.runtime, self.run = runtime, run
        self.is_first_step = True

    @contextlib.contextmanager
    def of_step(self, step):
        """Context manager for the training step with this number."""
        if not self.runtime.compiles:
            yield
            return
        if self.is_first_step:
            self.run.print(
                f"step {step}: compiling the training step, which can take minutes; later steps reuse the compiled graph"
            )
        compiled = False
        try:
            yield
        finally:
            compiled = self.record(step)
        if self.is_first_step and not compiled:
            self.run.print(f"step {step}: this session had already compiled this graph, so nothing was compiled")
        self.is_first_step = False

    def record(self, step):
        """Log what was compiled since the last call. Returns whether anything was."""
        events = self.runtime.take_compile_events()
        for event in events:
            self.run.log("compile", step, **event)
            is_step = event["what"] == "step"
            if not event["refused"] and (is_step or event["seconds"] >= LONG_COMPILE_S):
                count = "1 graph" if event["programs"] == 1 else f"{event['programs']} graphs"
                what = "" if is_step else f" for {event['what']}"
                why = f", because {event['why'][0]}" if event["why"] else ""
                self.run.print(f"step {step}: compiled {count} in {event['seconds']:.1f} s{what}{why}")
        return bool(events)
