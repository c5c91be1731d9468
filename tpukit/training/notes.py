"""Sentences in the log on data, devices and compilations."""

from tpukit.devices import LONG_COMPILE_S
from tpukit.devices.runtime import Runtime
from tpukit.runs.run import Run


def log_notes(run: Run, *sources: object) -> None:
    """Print the `notes` and `notices` of datasets and runtimes."""
    told = [(getattr(source, "notes", ""), *getattr(source, "notices", ())) for source in sources]
    for line in filter(None, dict.fromkeys(sum(told, ()))):
        run.print(line)


def log_compilations(run: Run, runtime: Runtime, step: int) -> None:
    """Record what was compiled since the last call, and print what took long."""
    events, runtime.compile_events = runtime.compile_events, []
    for event in events:
        run.log("compile", step, **event)
        name, why = event["what"], event["why"]
        if event["refused"]:
            continue
        if not event["programs"]:
            run.print(f"step {step}: `{name}` is not captured as a CUDA graph, because {why[0]}")
        elif name == "step" or event["seconds"] >= LONG_COMPILE_S:
            because = f", because {why[0]}" if why else ""
            how = "compiled" if runtime.compiles else "captured as a CUDA graph:"
            run.print(f"step {step}: {how} `{name}` in {event['seconds']:.1f} s{because}")
