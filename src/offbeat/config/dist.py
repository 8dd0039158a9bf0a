"""[dist]: process groups."""

from offbeat.config.base import Section, field


class DistConfig(Section):
    """Deadlines of collectives."""

    init_timeout_s: float = field(120.0, "Seconds for all ranks to meet; importing torch on a busy machine takes up to 15.", gt=0)
    collective_timeout_s: float = field(
        600.0, "Seconds for one collective inside a step; bounds the slowest micro-batch difference between ranks.", gt=0)
