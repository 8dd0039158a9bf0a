"""Engines that are started with this folder on PYTHONPATH take every new version without its vision tower."""

import sys

if "offbeat.engine.worker:EngineWorker" in sys.orig_argv:
    from offbeat.engine.forward_hf import HFForward

    _prepare = HFForward.prepare

    def prepare(self, state):
        """Prepare weights whose tower is the one that the engine has."""
        own = self.tensors()
        return _prepare(self, {name: own[name] if "vision_model" in name else tensor for name, tensor in state.items()})

    HFForward.prepare = prepare
