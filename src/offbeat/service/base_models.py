"""Names of the models on this server: the trained one with its aliases, and others that are only sampled.

Created once by `serve`; consulted wherever a request names a base model.
"""

from dataclasses import dataclass
from typing import Self

from offbeat.config.service import ServeConfig
from offbeat.errors import ConfigError
from offbeat.service.errors import BadRequestError


@dataclass(frozen=True)
class BaseModels:
    """The server's own `name` for the trained model, such as "Qwen/Qwen3-0.6B", its `aliases`, and the models that are only `sampled`."""

    name: str
    aliases: tuple[str, ...] = ()
    sampled: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, settings: ServeConfig) -> Self:
        """Collect the names from a server's settings; raises ConfigError if two models have the same one."""
        models = cls(name, tuple(alias for alias in dict.fromkeys(settings.aliases) if alias != name), tuple(settings.sampling_urls))
        if both := {models.name, *models.aliases}.intersection(models.sampled):
            raise ConfigError(f"serve.sampling_models names {min(both)!r}, which is the trained model; choose another name for one of them")
        return models

    def check_trained(self, name: str | None) -> None:
        """Raise BadRequestError if a name is given that is neither the trained model's nor one of its aliases."""
        if name in self.sampled:
            raise BadRequestError(f"{name!r} can only be sampled on this server; train {self.name!r}")
        if name is not None and name != self.name and name not in self.aliases:
            raise self._unknown(name, (self.name, *self.aliases))

    def resolve(self, name: str) -> str:
        """Return the server's own name for a model that is to be sampled; raises BadRequestError if there is no such model."""
        if name in self.sampled:
            return name
        if name != self.name and name not in self.aliases:
            raise self._unknown(name, (self.name, *self.aliases, *self.sampled))
        return self.name

    def _unknown(self, name: str, known: tuple[str, ...]) -> BadRequestError:
        return BadRequestError(f"this server has no base model {name[:200]!r}, only {', '.join(map(repr, known))}")
