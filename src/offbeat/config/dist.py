"""[dist]: deadlines of process groups."""

from offbeat.config.base import Change, Section, field


class DistConfig(Section):
    """Deadlines of ranks that wait for each other."""

    on_resume = Change.FREE

    init_timeout_s: float = field(120.0, "Seconds for all ranks to meet; importing torch on a busy machine takes up to 15.", gt=0)
    sync_timeout_s: float = field(
        120.0, "Seconds that a rank waits for the others at a sync point, and for which a working rank may be stopped or make no progress;"
        " ranks arrive together, so anything longer is a fault.", gt=0)
    answer_timeout_s: float = field(
        1.0, "Seconds for a rank to report where it is after a sync point was missed; a live interpreter needs milliseconds.", gt=0)
    collective_timeout_s: float = field(
        600.0, "Seconds for one collective inside a step; bounds the slowest micro-batch difference between ranks.", gt=0)
