"""Compile one graph for a TPU that is not there, with libtpu's own compiler. A script for the environment
that `plan` installs.

    python tpu_compiler.py GRAPH TOPOLOGY CORES    # GRAPH: a StableHLO portable artifact; each core a replica

Prints one line of JSON: the memory and arithmetic that the compiler reports and the text of the compiled
graph, or {"error": its reason}. Imports nothing of tpukit, because jaxlib must not meet torch_xla. (That
libtpu compiles without a chip, and how jax asks it to, is from jax's own ahead-of-time tests.)"""

import ctypes
import json
import os
import signal
import sys

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
os.environ.update(TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")


def main(graph, topology, cores):
    import jaxlib
    import numpy
    from jax._src.interpreters import mlir
    from jax.experimental import topologies
    from jaxlib import xla_client
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    bounds = [int(n) for n in topology.partition(":")[2].split("x")]
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, chips_per_host_bounds=(*bounds, *[1] * (3 - len(bounds)))
    )
    devices = description.devices[:cores]
    options = xla_client.CompileOptions()
    options.num_replicas = options.executable_build_options.num_replicas = cores
    ids = numpy.array([[device.id] for device in devices])  # (replicas, partitions)
    options.device_assignment = xla_client.DeviceAssignment.create(ids)
    with mlir.make_ir_context() as context, ir.Location.unknown(context), open(graph, "rb") as file:
        module = stablehlo.deserialize_portable_artifact(context, file.read())
        for attribute in list(module.operation.attributes):
            name = attribute if isinstance(attribute, str) else attribute.name
            if name.startswith("mhlo."):  # torch_xla's, unknown to this compiler
                del module.operation.attributes[name]
        donate_replaced_arguments(module, ir)
        try:
            # jaxlib 0.7 takes the module as bytes, 0.10 as it is.
            code = mlir.module_to_bytecode(module) if jaxlib.__version__.startswith("0.7.") else module
            compiled = devices[0].client.compile(code, xla_client.DeviceList(tuple(devices)), options)
        except Exception as error:  # jaxlib raises one type for all that the compiler refuses
            return dict(error=str(error))
    memory, cost = compiled.get_compiled_memory_stats(), compiled.cost_analysis()
    cost = cost if isinstance(cost, dict) else cost[0]
    return dict(
        peak_bytes=memory.peak_memory_in_bytes,
        flops=cost.get("flops", 0.0),  # missing if a graph only copies
        hlo=compiled.hlo_modules()[0].to_string(),
    )


def donate_replaced_arguments(module, ir):
    """Let results take the memory of arguments of the same type, as torch_xla does with the weights that a
    step replaces."""
    functions = {function.attributes["sym_name"].value: function for function in module.body.operations}
    main = functions["main"]
    free = [str(result) for result in main.type.results]
    attributes = []
    for argument in main.type.inputs:
        donated = {}
        if str(argument) in free:
            free.remove(str(argument))
            donated["jax.buffer_donor"] = ir.BoolAttr.get(True)
        attributes.append(ir.DictAttr.get(donated))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


if __name__ == "__main__":
    # 1 is PR_SET_PDEATHSIG: a plan that is killed leaves no compiler behind, with its many GB.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
