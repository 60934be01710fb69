"""Replicas of an engine under Ray Serve, each with the whole OpenAI API of `specc serve`.

    pip install "ray[serve]"
    cd examples && serve run ray_serve:replicas engine=$PWD/../out/pair-engine num_replicas=2

Ray starts the replicas, spreads requests over them and replaces those that fail; specc knows
nothing of it. Other nodes need the engine at the same path, and specc and this file on their
`PYTHONPATH` (Ray's `runtime_env`).
"""

from functools import cache

from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve
from ray.serve import Application

from specc.runtime.engine_args import AsyncEngineArgs
from specc.runtime.requests.chat_template import load_template
from specc.runtime.service.service import Service
from specc.runtime.service.state import Health
from specc.server.app import create_app
from specc.server.config import ServeConfig
from specc.server.run import start_service


class Options(BaseModel, frozen=True):
    """What `serve run` says of the application.

    Args:
        engine: directory of the engine, the same on every node.
        num_replicas: processes that hold the engine.
        threads: of each of them; Ray reserves as many cores.
        model: what clients call it.
    """

    engine: str
    num_replicas: int = 1
    threads: int = 2
    model: str = "specc"


def replicas(options: Options) -> Application:
    """The application: replicas of one engine."""

    # Ray calls a plain function where the replica runs; what is made here would be pickled
    def build() -> FastAPI:
        service = service_of(options)
        config = ServeConfig(model_names=(options.model,))
        return create_app(service, config, load_template(service.engine.directory))

    deployment = serve.deployment(
        serve.ingress(build)(Replica),
        name=options.model,
        num_replicas=options.num_replicas,
        # the engine itself queues up to `max_waiting` requests and says 503 after that
        max_ongoing_requests=1024,
        ray_actor_options={"num_cpus": options.threads},
        # a draining replica answers what it has begun
        graceful_shutdown_timeout_s=30,
    )
    return deployment.bind(options)


class Replica:
    """What Ray asks about one process with the engine, its queue and its API."""

    def __init__(self, options: Options) -> None:
        self._service = service_of(options)

    def check_health(self) -> None:
        """Raises RuntimeError: the engine has failed for good; Ray replaces the replica."""
        if self._service.health is Health.DEAD:
            raise RuntimeError("the engine has failed for good")

    def __del__(self) -> None:
        self._service.close()


@cache
def service_of(options: Options) -> Service:
    """The engine of this process, loaded once."""
    return start_service(AsyncEngineArgs(engine=options.engine, num_threads=options.threads))
