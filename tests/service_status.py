"""A status of a busy service, made up."""

import uuid

from offbeat.service.types import (
    EngineStatus,
    FailedRequest,
    Incident,
    IncidentCounts,
    ModelStatus,
    OwnerStatus,
    ProcessStatus,
    QueueStatus,
    Status,
)


def busy_status(now: float, *, num_owners: int = 16) -> Status:
    """Sixteen tenants at work, a rank that died, an engine being healed and two failures."""
    ids = [f"{uuid.UUID(int=0x9e3779b97f4a7c15f39cc0605cedc834 * (i + 1) % 2**128)}:train:{i % 3}" for i in range(num_owners)]
    models = tuple(
        ModelStatus(
            model, f"owner-{i}", 8 << (i % 3), 17 * i, i % 4 != 3, now - 1.7 * i * i, trained_per_s=310.5 * (i % 4),
            sampled_per_s=0.0 if i % 3 else 88.2)
        for i, model in enumerate(ids))
    owners = tuple(
        OwnerStatus(f"owner-{i}", 1, 9000 * (i % 5), 13_000_000 * i, checkpoints=3 * i, samplers=i) for i in range(num_owners))
    held = tuple(f"{model.replace(':', '.')}@{i}" for i, model in enumerate(ids[:9]))
    engines = (EngineStatus("engine 0", "serving", held, 48_211), EngineStatus("engine 1", "healing", (), 0))
    failures = (
        FailedRequest(now - 3, f"{ids[1]}:7", "owner-1", "the gradient of step 7 is not finite; the step was left out"),
        FailedRequest(now - 400, f"{ids[2]}:9", "owner-2", "<b>markup</b> is shown as text"))
    incidents = (
        Incident(now - 2, "engine 1", "left service: engine 1 (http://127.0.0.1:41233) cannot be reached: Connection refused"),
        Incident(now - 310, "trainers", "started again in 4.1 s"), Incident(now - 314, "trainers", "rank 1 died"),
        Incident(now - 5000, "engine 0", f"could not load {held[0]}: a file is not what was written"))
    processes = tuple(ProcessStatus(name, size << 20) for name, size in (
        ("service", 310), ("rank 0", 1650), ("rank 1", 1490), ("engine 0", 2210), ("engine 1", 0)))
    return Status(
        "Qwen/Qwen3-0.6B", True, 8_200_000, 1_900_000, QueueStatus(7, 61_000, 1.25), models, owners, engines, failures,
        QueueStatus(112, 230_400, 0.4), incidents,
        IncidentCounts(rank_deaths=1, trainer_restarts=1, quarantines=1, failed_loads=1), processes)
