"""Apache Kafka's jars, downloaded by Maven, and the Java that runs them."""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from streamtrain.errors import ConfigError

VERSION = "4.2.0"
JAVA = 17  # the oldest that this version runs on

_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>streamtrain</groupId><artifactId>kafka</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
"""
logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where downloads are kept: ~/.cache/streamtrain, or a folder of this user's beside temporary files.

    A user id without an entry in passwd has no home unless HOME says so, as in some containers; others may not write
    to theirs.

    Raises:
        ConfigError: somebody else has made that folder, and might have put something there.
    """
    try:
        folder = Path.home() / ".cache" / "streamtrain"
    except RuntimeError:
        folder = None
    if folder is not None and (folder.is_dir() or _can_be_made(folder)):
        return folder
    folder = Path(tempfile.gettempdir()) / f"streamtrain-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder}, where downloads are kept without a home folder, is another user's: set HOME")
    return folder


def _can_be_made(folder: Path) -> bool:
    there = next(one for one in folder.parents if one.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def jars_folder() -> Path:
    """Where `resolve` keeps Kafka's jars; errors as `cache_folder`."""
    return cache_folder() / f"kafka-{VERSION}"


def resolve(cache: Path | None = None) -> Path:
    """Downloads Kafka's jars with Maven, unless they exist. Any number of processes may do so at once.

    Args:
        cache: folder of the jars; created atomically. None: `jars_folder`.

    Returns:
        The folder.

    Raises:
        ConfigError: Maven is missing or fails.
    """
    cache = cache or jars_folder()
    if cache.is_dir():
        return cache
    cache.parent.mkdir(parents=True, exist_ok=True)
    with (cache.parent / f".{cache.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if cache.is_dir():
            return cache
        with tempfile.TemporaryDirectory(dir=cache.parent, prefix=f".{cache.name}.") as work:
            _copy_jars(Path(work))
            (Path(work) / "jars").rename(cache)
    return cache


def find_jars(given: str | None = None) -> Path | None:
    """The folder of Kafka's jars, if `up` and `demo` can run Kafka here; None: they cannot.

    Args:
        given: the setting `up.kafka`; None: what `resolve` has downloaded, if it has.

    Raises:
        ConfigError: `given` has no Kafka, or no Java on the PATH can run it.
    """
    if given is not None:
        if not any(Path(given).glob("kafka_*.jar")):
            raise ConfigError(
                f"up.kafka: {given} has no kafka_*.jar; set it to the folder libs of a Kafka distribution, or leave it "
                "unset to stream through Redis"
            )
        find_java()
        return Path(given).resolve()
    try:
        find_java()
    except ConfigError:
        return None
    jars = jars_folder()
    return jars if jars.is_dir() else None


def _copy_jars(work: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise ConfigError(
            "Maven, which gets Apache Kafka, is not on the PATH; install it (on Debian: apt install maven)"
        )
    logger.info("downloading Apache Kafka %s with Maven (45 MB)", VERSION)
    (work / "pom.xml").write_text(_POM)
    command = [maven, "-B", "-q", "-f", str(work / "pom.xml"), _COPY, f"-DoutputDirectory={work / 'jars'}"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0 or not any((work / "jars").glob("kafka_*.jar")):
        raise ConfigError(
            f"Maven cannot download Apache Kafka {VERSION}; if Maven Central is not reachable, set a mirror in "
            f"~/.m2/settings.xml: {last_lines(done.stdout, 5)}"
        )


def find_java() -> str:
    """The Java on the PATH.

    Raises:
        ConfigError: there is none, or it is too old.
    """
    way_out = f"install Java {JAVA} or newer (on Debian: apt install openjdk-17-jre-headless)"
    java = shutil.which("java")
    if java is None:
        raise ConfigError(f"Apache Kafka runs on Java, which is not on the PATH; {way_out}")
    output = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    match = re.search(r'version "(?:1\.)?(\d+)', output)
    if match is None or int(match[1]) < JAVA:
        raise ConfigError(f"Apache Kafka {VERSION} does not run on {java} ({last_lines(output, 3)}); {way_out}")
    return java


def class_archive(java: str, jars: Path) -> Path:
    """Where a broker keeps its parsed classes for later starts (class data sharing); it may not exist yet.

    Args:
        java: the Java that runs it.
        jars: its folder of jars.
    """
    real = Path(java).resolve()
    of = f"{VERSION} {real} {real.stat().st_mtime_ns} {jars.resolve()}"
    return cache_folder() / f"classes-{hashlib.sha256(of.encode()).hexdigest()[:12]}.jsa"


def last_lines(text: str, count: int) -> str:
    """The last lines of a program's output."""
    return "\n".join(text.strip().splitlines()[-count:])
