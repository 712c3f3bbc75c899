"""A server over the tiny engine, and clients of it."""

import threading
import time

import httpx
import openai
import pytest
from http_server import serving


@pytest.fixture(scope="module")
def server(tiny_engine):
    with serving(tiny_engine) as made:
        yield made


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's own client."""
    transport = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", http_client=transport) as made:
        yield made


@pytest.fixture
def slow(tiny_engine, monkeypatch):
    """Every round of the engine takes 30 ms more."""
    step = tiny_engine.core.step
    monkeypatch.setattr(tiny_engine.core, "step", lambda: time.sleep(0.03) or step())


@pytest.fixture
def gate(tiny_engine, monkeypatch):
    """Rounds of the engine wait while the gate is closed; it is open at first."""
    step, opened = tiny_engine.core.step, threading.Event()
    opened.set()
    monkeypatch.setattr(tiny_engine.core, "step", lambda: opened.wait(60) and step())
    yield opened
    opened.set()
