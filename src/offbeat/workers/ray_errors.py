"""Errors of Ray in our words: one sentence each, with a remedy. `workers.ray` surrounds its calls of Ray with `translated`.

A worker whose actor cannot be asked any more counts as dead, because nobody knows whether it carried out its last call.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ray import exceptions as ray_errors
from ray.exceptions import RayError

from offbeat.errors import ConfigError, DeadlineError, DeathError, OffbeatError, WorkerError, first_line

_KINDS: tuple[tuple[tuple[type[RayError], ...], type[OffbeatError], str], ...] = (
    ((ray_errors.OutOfMemoryError,), DeathError,
     "{name} was ended by Ray {doing}, because its machine ran out of memory; give it a machine with more, or lower what it holds, such as"
     " train.max_tokens_per_microbatch or inference.max_running: {said}"),
    ((ray_errors.ActorUnavailableError,), DeathError,
     "{name} cannot be reached {doing}, because the connection to its machine is lost; look at `ray status` and at the network: {said}"),
    ((ray_errors.NodeDiedError, ray_errors.LocalRayletDiedError), DeathError,
     "{name} died {doing}, with Ray on its machine; look at `ray status` and the logs of that machine in /tmp/ray: {said}"),
    ((ray_errors.RayActorError, ray_errors.WorkerCrashedError), DeathError, "{name} died with its Ray actor {doing}: {said}"),
    ((ray_errors.ObjectLostError,), DeathError,
     "{name} cannot be heard {doing}, because its message was lost with the machine that held it: {said}"),
    ((ray_errors.ObjectStoreFullError,), WorkerError,
     "a message from or to {name} does not fit into Ray's object store {doing}; start Ray with a larger --object-store-memory: {said}"),
    ((ray_errors.OutOfDiskError,), WorkerError,
     "a message from or to {name} cannot be held by Ray {doing}, because the disk of its folder is full; free space, or start Ray with"
     " --temp-dir on another disk: {said}"),
    ((ray_errors.RuntimeEnvSetupError,), ConfigError,
     "{name} cannot start, because Ray cannot set up its runtime environment; correct it in the job's or the cluster's settings: {said}"),
    ((ray_errors.ActorUnschedulableError, ray_errors.TaskUnschedulableError, ray_errors.ActorPlacementGroupRemoved,
      ray_errors.TaskPlacementGroupRemoved), WorkerError,
     "{name} has no room any more on the Ray cluster {doing}; look at `ray status` for machines that have gone: {said}"),
    ((ray_errors.AuthenticationError,), ConfigError,
     "the Ray cluster does not let this run in; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as for `ray status`: {said}"),
    ((ray_errors.GetTimeoutError,), DeadlineError, "Ray did not bring the answer of {name} {doing} in time: {said}"),
    ((ray_errors.RayTaskError,), WorkerError, "{name} failed {doing}, in its Ray actor: {said}"),
)
"""The first row that fits counts; errors of no row mean that the cluster itself does not answer."""

_LOST = "the Ray cluster does not answer while {name} is called {doing}; look at `ray status`, and start the run again: {said}"


@contextmanager
def translated(name: str, doing: str) -> Iterator[None]:
    """Turn Ray's errors in the body into ours.

    Args:
        name: name of the worker that is called, or of another subject, such as "this run".
        doing: the call, for example "in train_step" or "to start".

    Raises:
        DeathError: the worker died, or cannot be asked any more.
        WorkerError: it failed, or the cluster does not answer.
        ConfigError: the cluster refuses it.
        DeadlineError: Ray was late.
    """
    try:
        yield
    except RayError as exc:
        kind, text = next(((ours, text) for theirs, ours, text in _KINDS if isinstance(exc, theirs)), (WorkerError, _LOST))
        raise kind(text.format(name=name, doing=doing, said=last_line(exc))) from exc
    except (ConnectionError, RuntimeError) as exc:
        if isinstance(exc, OffbeatError):
            raise
        # The client of Ray's store raises these where it has lost the cluster.
        raise WorkerError(_LOST.format(name=name, doing=doing, said=first_line(exc))) from exc


def last_line(exc: Exception) -> str:
    """Return the last line of Ray's text, which is the error; lines before it are details, or a remote traceback."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[-1] if lines else type(exc).__name__
