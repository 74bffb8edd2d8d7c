"""The server against clients nobody here wrote: openai, httpx and curl; and against clients that misbehave."""

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subquad.models import LanguageModel
from subquad.serve import answer, exchange, server
from subquad.serve.settings import ServeSettings
from tests.serve.scripted import Scripted

KEY = "sk-one"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
