"""TensorFlow's ParameterServerStrategy with one server, as its tutorial writes a loop of one's own.

The coordinator is this process; the server and the trainers ("workers" there) are processes of
their own. Several steps may be one call, which is what the tutorial advises where the coordinator
cannot keep up.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .ps_job import BATCH, LR, STARTED, TRAINERS, Finding, Job, loss_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf  # type: ignore[import-untyped]


def train(job: Job, together: int = 1) -> Finding:
    """`together` steps are one call of the coordinator."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    work = job.work()
    parameters = [p.detach().T.numpy().copy() for p in work.model().parameters()]
    _leave_data(job, work.x, work.y)
    with _cluster() as spec:
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            weights = [tf.Variable(value) for value in parameters]
        batches = iter(coordinator.create_per_worker_dataset(lambda: _dataset(job.folder)))
        step = _step(strategy, weights, together)

        def run(calls: int) -> None:
            for _ in range(calls):
                coordinator.schedule(step, args=(batches,))
            coordinator.join()

        run(TRAINERS * -(-job.warmup // together))
        calls = TRAINERS * -(-job.steps // together)
        began = time.monotonic()
        run(calls)
        rate = calls * together / (time.monotonic() - began)
        learnt = [torch.from_numpy(np.ascontiguousarray(w.numpy().T)) for w in weights]
        return Finding(rate, loss_of(work, learnt))


def _step(strategy: Any, weights: list[Any], together: int) -> Any:
    def once(batches: Any) -> None:
        x, y = next(batches)
        with tf.GradientTape() as tape:
            for layer in range(0, len(weights), 2):
                x = tf.linalg.matmul(x, weights[layer]) + weights[layer + 1]
                x = tf.nn.relu(x) if layer < len(weights) - 2 else x
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)
            loss = tf.reduce_mean(each)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            # The kernel of SGD itself, which runs where the weight is: on the server.
            tf.raw_ops.ResourceApplyGradientDescent(var=weight.handle, alpha=LR, delta=gradient)

    @tf.function  # type: ignore[untyped-decorator]
    def step(batches: Any) -> None:
        for _ in range(together):
            strategy.run(once, args=(batches,))

    return step


def _leave_data(job: Job, x: torch.Tensor, y: torch.Tensor) -> None:
    """Where the trainers read them: they would be too large for the graph that they are sent."""
    whole = len(x) // BATCH * BATCH
    x[:whole].numpy().tofile(job.folder / "x")
    y[:whole].int().numpy().tofile(job.folder / "y")


def _dataset(folder: Path) -> Any:
    """Batches cut beforehand, as everywhere."""
    x = tf.io.decode_raw(tf.io.read_file(str(folder / "x")), tf.float32)
    y = tf.io.decode_raw(tf.io.read_file(str(folder / "y")), tf.int32)
    cut = tf.reshape(x, (-1, BATCH, 784)), tf.reshape(y, (-1, BATCH))
    whole = tf.data.Dataset.from_tensor_slices(cut)
    # Each trainer begins elsewhere: there is no other way to tell them apart in here.
    return whole.shuffle(1000).repeat().prefetch(2)


@contextmanager
def _cluster() -> Iterator[dict[str, list[str]]]:
    """A server and the trainers, each serving at a port that it found itself."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        found: dict[str, list[str]] = {"ps": [], "worker": []}
        for job in ["ps", *["worker"] * TRAINERS]:
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(job, len(found[job]), theirs), daemon=True
            )
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            assert mine.poll(STARTED), f"{job} did not start within {STARTED:g} s"
            found[job].append(mine.recv())
        yield found


def _serve(job: str, number: int, tell: Connection) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1,
        # As the tutorial says of machines with few cores: fewer, and trainers stand still.
        inter_op_parallelism_threads=TRAINERS + 1,
    )
    # The coordinator tells all of them who else there is: here it is enough to be somewhere.
    server = tf.distribute.Server(
        {job: {number: "127.0.0.1:0"}}, job_name=job, task_index=number, config=config
    )
    tell.send(server.target.partition("://")[2])
    server.join()
