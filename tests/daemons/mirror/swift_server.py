"""OpenStack Swift with its S3 interface: account, container and object servers in one process. For Debian's own python3
(packages swift-proxy, swift-account, swift-container, swift-object). `python3 swift_server.py FOLDER` prints the port
of loopback where it answers. One replica; user test:tester, key testing.
"""

import os
import sys
from array import array
from pathlib import Path

import eventlet
import eventlet.wsgi

eventlet.monkey_patch()

from swift.common import utils  # noqa: E402

HASHES = (
    "[swift-hash]\nswift_hash_path_prefix = a\nswift_hash_path_suffix = b\n[storage-policy:0]\nname = one\ndefault = "
    "yes\n"
)
PROXY = """
[DEFAULT]
swift_dir = {folder}
[pipeline:main]
pipeline = catch_errors s3api tempauth proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
"""


class Cache:
    """The part of memcached that Swift uses."""

    def __init__(self):
        self.kept = {}

    def set(self, key, value, *args, **kwargs):
        self.kept[key] = value

    def get(self, key, *args, **kwargs):
        return self.kept.get(key)

    def delete(self, key, *args, **kwargs):
        self.kept.pop(key, None)


def main():
    folder = Path(sys.argv[1]).absolute()
    (folder / "disks" / "sda1").mkdir(parents=True)
    (folder / "swift.conf").write_text(HASHES)
    (folder / "proxy.conf").write_text(PROXY.format(folder=folder))
    utils.SWIFT_CONF_FILE = str(folder / "swift.conf")
    utils.validate_hash_conf()

    # These modules read that file at import.
    from swift.account.server import AccountController
    from swift.common import storage_policy
    from swift.common.ring import RingData
    from swift.common.wsgi import loadapp
    from swift.container.server import ContainerController
    from swift.obj.server import ObjectController

    storage_policy.reload_storage_policies()
    sockets = {name: eventlet.listen(("127.0.0.1", 0)) for name in ("account", "container", "object", "proxy")}
    device = {
        "id": 0,
        "zone": 0,
        "region": 1,
        "device": "sda1",
        "weight": 1.0,
        "meta": "",
        "ip": "127.0.0.1",
        "replication_ip": "127.0.0.1",
    }
    for name in ("account", "container", "object"):
        port = sockets[name].getsockname()[1]
        ring = RingData([array("H", [0])], [device | {"port": port, "replication_port": port}], 32)
        ring.save(str(folder / f"{name}.ring.gz"))
    conf = {
        "devices": str(folder / "disks"), "swift_dir": str(folder), "mount_check": "false", "fallocate_reserve": "0",
        "disable_fallocate": "true", "recon_cache_path": str(folder), "log_address": str(folder / "no-log"),
    }  # fmt: skip
    proxy, cache = loadapp(str(folder / "proxy.conf"), global_conf={"log_name": "swift"}), Cache()
    apps = {
        "account": AccountController(conf),
        "container": ContainerController(conf),
        "object": ObjectController(conf),
        "proxy": lambda env, start: proxy({**env, "swift.cache": cache}, start),
    }
    quiet = open(os.devnull, "w")  # noqa: SIM115
    threads = [
        eventlet.spawn(eventlet.wsgi.server, sockets[name], app, quiet, max_size=200) for name, app in apps.items()
    ]
    print(sockets["proxy"].getsockname()[1], flush=True)
    for thread in threads:
        thread.wait()


main()
