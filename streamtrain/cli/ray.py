"""`ray up`: the whole service on a Ray cluster."""

import contextlib
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from streamtrain.cli.options import (
    Config,
    LearnedTopic,
    LogFormat,
    ModelSetting,
    Setting,
    read_settings,
    set_up_process_log,
)
from streamtrain.errors import ConfigError
from streamtrain.shutdown import stop_on_signals

ray = typer.Typer(no_args_is_help=True, help="Run the service on a Ray cluster.")


@ray.command()
def up(  # noqa: PLR0917  # typer makes options of them; nobody calls it with positions
    model: ModelSetting = None,
    topic: LearnedTopic = None,
    address: Annotated[str, typer.Option(help="Of the Ray cluster; auto: that of this node.")] = "auto",
    shards: Annotated[int, typer.Option(min=1, max=256, help="Number of shards.")] = 2,
    backups: Annotated[bool, typer.Option(help="Give each shard a backup on another node.")] = True,
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 2,
    servers: Annotated[int, typer.Option(min=1, help="Number of serving processes.")] = 2,
    cpus: Annotated[float, typer.Option(min=0.0, help="CPUs that each process reserves.")] = 1.0,
    config: Config = None,
    setting: Setting = None,
    log_format: LogFormat = None,
) -> None:
    """Run shards, workers, coordinator and serving as actors of a Ray cluster, until Ctrl-C.

    Ray starts what ends again, also on another node. The folder of the model goes to all nodes, which need streamtrain.
    """
    from streamtrain.service import ray_cluster
    from streamtrain.service.service_file import kept_service_file

    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed: pip install 'streamtrain[ray]'")
    overrides: dict[str, object] = {"model": model, "stream.topic": topic, "log.format": log_format}
    settings = read_settings(config, setting, overrides)
    ray_cluster.check(settings)
    known = ray_cluster.addresses(shards, backups=backups)
    settings = read_settings(config, setting, overrides | known)
    set_up_process_log(settings, "ray")
    stopped = stop_on_signals()
    assert settings.model is not None
    file, _, name = settings.model.partition(":")
    folder = Path(file).resolve().parent
    settings = settings.model_copy(update={"model": f"{Path(file).name}:{name}" if name else Path(file).name})
    import ray as cluster

    environment = {"working_dir": str(folder), "excludes": [settings.up.data, ".git", ".venv"]}
    data = Path(settings.up.data)
    data.mkdir(parents=True, exist_ok=True)
    cluster.init(address=address, namespace=f"streamtrain-{settings.publish.model}", runtime_env=environment)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.shutdown)
        stack.enter_context(kept_service_file(settings, data))
        parts = ray_cluster.roles(settings, shards, workers, servers)
        service = ray_cluster.RayService(settings, parts, cpus)
        stack.callback(service.close)
        service.run(stopped)
