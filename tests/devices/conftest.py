"""A training step by hand."""


def take_step(runtime, loss, optimizer):
    optimizer.zero_grad(set_to_none=True)
    runtime.backward(loss, optimizer)
    runtime.all_reduce_gradients(optimizer)
    runtime.optimizer_step(optimizer)
