"""The engine on another device than the CPU, without one: every tensor of a step is there, and the host waits for it once per step."""

import pytest
import torch
from accelerator import DEVICE, Accelerator, Held

from offbeat.inference.embedded.engine import Engine
from offbeat.inference.embedded.loader import load_engine
from offbeat.inference.embedded.options import EngineOptions
from offbeat.inference.embedded.request import Output, Request, SamplingParams
from offbeat.inference.embedded.versions import fingerprint_tensors

