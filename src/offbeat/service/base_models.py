"""What clients call the models of this server: one that is trained, under any of its names, and others that are only sampled.

Made once by `serve`; asked wherever a request names a base model.
"""

from dataclasses import dataclass
from typing import Self

from offbeat.config.service import ServeConfig
from offbeat.errors import ConfigError
from offbeat.service.errors import BadRequestError


@dataclass(frozen=True)
class BaseModels:
    """Names of models.

    Attributes:
        name: of the one that is trained, as the server itself calls it.
        aliases: its other names.
        sampled: of those that are only sampled.
    """

    name: str
    aliases: tuple[str, ...] = ()
    sampled: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, settings: ServeConfig) -> Self:
        """Those of a server.

        Raises:
            ConfigError: two models have one name.
        """
        models = cls(name, tuple(alias for alias in dict.fromkeys(settings.aliases) if alias != name), tuple(settings.sampling_urls))
        if both := {models.name, *models.aliases}.intersection(models.sampled):
            raise ConfigError(f"serve.sampling_models names {min(both)!r}, which is the trained model; choose another name for one of them")
        return models

    def check_trained(self, name: str | None) -> None:
        """Raise BadRequestError unless the name, if there is one, is that of the model that is trained."""
        if name in self.sampled:
            raise BadRequestError(f"{name!r} can only be sampled on this server; train {self.name!r}")
        if name is not None and name != self.name and name not in self.aliases:
            raise self._unknown(name, (self.name, *self.aliases))

    def resolve(self, name: str) -> str:
        """What the server itself calls the model that a sampler is to sample; raises BadRequestError if there is none."""
        if name in self.sampled:
            return name
        if name != self.name and name not in self.aliases:
            raise self._unknown(name, (self.name, *self.aliases, *self.sampled))
        return self.name

    def _unknown(self, name: str, known: tuple[str, ...]) -> BadRequestError:
        return BadRequestError(f"this server has no base model {name[:200]!r}, only {', '.join(map(repr, known))}")
