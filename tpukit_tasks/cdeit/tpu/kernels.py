"""Attention as TPU kernels in Pallas, for `attention.py` to hand to the compiler. A script, for a Python with
jax.

    python kernels.py '{"shape": [16, 4096, 1536], "heads": 16, "biased": false}'

Prints a line of JSON, the payload of each kernel's `tpu_custom_call`. Imports nothing of tpukit: jax stays
out of the process in which torch_xla holds the TPU.

Shapes: B batch, T tokens, H heads, D channels of a head, C = H * D; g = 128 / D heads fill the 128 lanes of a
register, G = H / g is the number of such groups; Q queries at a time.

A kernel reads (B, T, 3 C), as the linear layer before it wrote it, in blocks of one group, and writes (B, T,
C): in the TPU's memory no head is padded to 128 lanes or transposed. The g heads of a block are told apart by
zeros: g copies of its queries, each with the lanes of one head only, are multiplied with the keys of the
whole group at once. All keys of an image are in fast memory together, and so are whole columns of the logits
(T, g * Q): a softmax needs no second pass, and nothing has to be kept for the backward pass, which computes
it again.

Traffic: the grid is (group, image, queries), and a block moves only when it changes from one step to the
next. Queries, result and its gradient change with every step, keys and values with group and image, the bias
and its gradient with the group. So in each kernel every array crosses the memory bus exactly once:

    kernel    moves                                               bytes            with a bias also
    forward   queries, keys, values -> result                     4 B T C * 2      H T T * 4
    backward  queries, keys, values, gradient -> three gradients  7 B T C * 2      2 H T T * 4
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
from jax.experimental import pallas
from jax.experimental.pallas import tpu

LANES = 128
LOGITS = 2**19  # in a block, 4 bytes each; the backward kernel has five such arrays in 16 MiB of fast memory
MOSAIC_VERSION = 4  # format of the kernels: the libtpu of torch_xla 2.8 (0.0.17) and newer ones read it


def forward(qkv, bias=None, *, heads, interpret=False):
    """qkv: (B, T, 3 C) queries, keys and values. bias: (G, T keys, g * T queries) float32, for the logits. ->
    [(B, T, C)]"""
    shape = Shape(qkv, heads)
    operands, specs = shape.inputs(qkv, bias)
    return pallas.pallas_call(
        _as_main(_forward, shape),
        grid=(shape.groups, shape.batch, shape.tokens // shape.queries),
        in_specs=specs,
        out_specs=[shape.rows],
        out_shape=[jax.ShapeDtypeStruct((shape.batch, shape.tokens, shape.width), qkv.dtype)],
        interpret=interpret,
    )(*operands)


def backward(qkv, gradient, bias=None, *, heads, interpret=False):
    """gradient: (B, T, C). -> [the gradient of qkv], and that of the bias (float32) if there is one."""
    shape = Shape(qkv, heads)
    steps = shape.tokens // shape.queries
    operands, specs = shape.inputs(qkv, bias, gradient)
    # The gradients of queries, keys and values are three blocks of one result. Two more steps write the last
    # two.
    part = pallas.BlockSpec(
        (1, shape.tokens, LANES), lambda h, b, i: (b, 0, jnp.clip(i - steps + 1, 0, 2) * shape.groups + h)
    )
    outputs, output_specs = [jax.ShapeDtypeStruct(qkv.shape, qkv.dtype)], [part]
    if bias is not None:
        outputs.append(jax.ShapeDtypeStruct(bias.shape, bias.dtype))
        output_specs.append(shape.table)
    return pallas.pallas_call(
        _as_main(_backward, shape, steps, bias is not None),
        grid=(shape.groups, shape.batch, steps + 2),
        in_specs=specs,
        out_specs=output_specs,
        out_shape=outputs,
        scratch_shapes=[tpu.VMEM((shape.tokens, LANES), jnp.float32)] * 2,
        interpret=interpret,
    )(*operands)


def _as_main(kernel, *given):
    """The kernel with its first arguments given, as a function called main: jax 0.10 names a kernel's code
    after its function, and the libtpu of torch_xla looks for main."""

    def main(*refs):
        return kernel(*given, *refs)

    return main


class Shape:
    """The sizes of a call, and the blocks that its grid (group of heads, image, queries) goes through."""

    def __init__(self, qkv, heads):
        self.batch, self.tokens, width = qkv.shape
        self.width = width // 3
        self.dim = self.width // heads
        self.scale = self.dim**-0.5
        self.heads, self.groups = LANES // self.dim, self.width // LANES  # heads in a group; groups
        self.queries = min(self.tokens, LOGITS // self.tokens // self.heads)
        last = self.tokens // self.queries - 1
        self.rows = pallas.BlockSpec((1, self.queries, LANES), lambda h, b, i: (b, jnp.minimum(i, last), h))
        self.table = pallas.BlockSpec((1, self.tokens, self.heads * self.tokens), lambda h, b, i: (h, 0, 0))

    def inputs(self, qkv, bias, *more):
        """Return (operands, their blocks): queries, keys, values, more blocks of rows, and the bias if there
        is one."""
        groups, columns = self.groups, (1, self.tokens, LANES)
        keys = pallas.BlockSpec(columns, lambda h, b, i: (b, 0, groups + h))
        values = pallas.BlockSpec(columns, lambda h, b, i: (b, 0, 2 * groups + h))
        operands, specs = [qkv, qkv, qkv, *more], [self.rows, keys, values, *[self.rows] * len(more)]
        if bias is not None:
            operands.append(bias)
            specs.append(self.table)
        return operands, specs

    def head_of_lane(self, rows):
        """(rows, 128) int32: which head of the group a lane belongs to."""
        # Not `//`, which jax 0.10 lowers only if there is a TPU.
        return jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1), self.dim)

    def spread(self, x):
        """(Q, 128) -> (g * Q, 128): for each head of the group the rows with zeros in the lanes of the
        others."""
        head_of_lane = self.head_of_lane(x.shape[0])
        return jnp.concatenate(
            [jnp.where(head_of_lane == head, x, jnp.zeros_like(x)) for head in range(self.heads)], 0
        )

    def gather(self, x):
        """(g * Q, 128) -> (Q, 128): from the rows of each head its own lanes."""
        rows = x.shape[0] // self.heads
        head_of_lane = self.head_of_lane(rows)
        parts = [
            jnp.where(head_of_lane == head, x[head * rows : (head + 1) * rows], 0)
            for head in range(self.heads)
        ]
        return sum(parts[1:], parts[0])

    def softmax(self, keys, queries, bias):
        """(numerators, denominators) of the weights, (T, g * Q) and (1, g * Q) float32: keys are rows,
        queries columns."""
        logits = _dot(keys, queries, 1, 1) * self.scale
        if bias is not None:
            logits += bias[0]
        weights = jnp.exp(logits - jnp.max(logits, 0, keepdims=True))
        return weights, jnp.sum(weights, 0, keepdims=True)


def _forward(shape, queries, keys, values, *refs):
    *bias, out = refs
    weights, total = shape.softmax(keys[0], shape.spread(queries[0]), *(bias or [None]))
    mixed = _dot(values[0], weights.astype(values.dtype), 0, 0) / total  # (128, g * Q)
    out[0] = shape.gather(mixed.T).astype(out.dtype)


def _backward(shape, steps, biased, queries, keys, values, gradient, *refs):
    bias, result, dbias, dk, dv = refs if biased else (None, refs[0], None, *refs[1:])
    image, step = pallas.program_id(1), pallas.program_id(2)

    @pallas.when(step == 0)
    def _():
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    if dbias is not None:

        @pallas.when((image == 0) & (step == 0))
        def _():
            dbias[...] = jnp.zeros_like(dbias)

    @pallas.when(step < steps)
    def _():
        q, d = shape.spread(queries[0]), shape.spread(gradient[0])
        weights, total = shape.softmax(keys[0], q, bias)
        weights *= 1 / total  # one division for a whole column
        dweights = _dot(values[0], d, 1, 1)
        dlogits = weights * (dweights - jnp.sum(weights * dweights, 0, keepdims=True))
        if dbias is not None:
            dbias[0] += dlogits
        dlogits = dlogits.astype(q.dtype)  # `scale` follows, in its two products
        dv[...] += _dot(weights.astype(d.dtype), d, 1, 0)
        dk[...] += _dot(dlogits, q, 1, 0)
        dq = shape.gather(_dot(keys[0], dlogits, 0, 0).T) * shape.scale
        rows = pallas.ds(pallas.multiple_of(step * shape.queries, shape.queries), shape.queries)
        result[0, rows] = dq.astype(result.dtype)

    @pallas.when(step == steps)
    def _():
        result[0] = (dk[...] * shape.scale).astype(result.dtype)

    @pallas.when(step == steps + 1)
    def _():
        result[0] = dv[...].astype(result.dtype)


def _dot(a, b, axis_of_a, axis_of_b):
    """The product of two matrices, summed in float32 over an axis of each."""
    return jax.lax.dot_general(
        a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=jnp.float32
    )


def payloads(shape, heads, biased):
    """Return the JSON that the `tpu_custom_call` of each kernel carries, by its name. shape: (B, T, 3 C)."""
    from jax._src import tpu_custom_call

    batch, tokens, width = shape
    groups = width // 3 // LANES
    qkv = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    gradient = jax.ShapeDtypeStruct((batch, tokens, width // 3), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((groups, tokens, heads // groups * tokens), jnp.float32)
    bias = [table] if biased else []
    tpu_custom_call.get_ir_version = lambda context: MOSAIC_VERSION
    # Without the lines of this file, so that the same kernel is the same graph wherever tpukit is installed.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    found = {}
    for kernel, arguments in ((forward, [qkv, *bias]), (backward, [qkv, gradient, *bias])):
        traced = jax.jit(functools.partial(kernel, heads=heads)).trace(*arguments)
        functions = traced.lower(lowering_platforms=("tpu",)).compiler_ir().body.operations
        operations = [operation for function in functions for operation in function.body.blocks[0].operations]
        [call] = [operation for operation in operations if operation.name == "stablehlo.custom_call"]
        found[kernel.__name__] = call.attributes["backend_config"].value
    return found


if __name__ == "__main__":
    print(json.dumps(payloads(**json.loads(sys.argv[1]))))
