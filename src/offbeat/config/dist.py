"""[dist]: deadlines of process groups."""

from offbeat.config.base import Section, field


class DistConfig(Section):
    """Deadlines of ranks that wait for each other."""

    init_timeout_s: float = field(120.0, "Seconds for all ranks to meet; importing torch on a busy machine takes up to 15.", gt=0)
    sync_timeout_s: float = field(
        120.0, "Seconds that a rank waits for the others at a named point, and for which it may be stopped while it works, or neither"
        " compute nor move data; ranks come to a point together, so what is longer is a fault.", gt=0)
    answer_timeout_s: float = field(
        1.0, "Seconds that a rank has to say where it is when a point was missed; an interpreter that is alive needs milliseconds.", gt=0)
    collective_timeout_s: float = field(
        600.0, "Seconds for one collective inside a step; bounds the slowest micro-batch difference between ranks.", gt=0)
