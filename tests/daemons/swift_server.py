"""OpenStack Swift with its S3 interface, all of it in one process: `python3 swift_server.py FOLDER` prints the port of loopback where it answers. For Debian's own python3,
with swift-proxy, swift-account, swift-container and swift-object installed. One replica; user test:tester, key testing."""

import os
import sys
from array import array
from pathlib import Path

import eventlet
import eventlet.wsgi

eventlet.monkey_patch()

import swift.common.utils as utils  # noqa: E402

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


class Cache(dict):
    """What Swift wants of memcached."""

    def __bool__(self):
        return True

    def set(self, key, value, *args, **kwargs):
        self[key] = value

    def get(self, key, *args, **kwargs):
        return dict.get(self, key)

    def delete(self, key, *args, **kwargs):
        self.pop(key, None)


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    disk = folder / "disks" / "sda1"
    disk.mkdir(parents=True)
    (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_prefix = a\nswift_hash_path_suffix = b\n[storage-policy:0]\nname = one\ndefault = yes\n")
    utils.SWIFT_CONF_FILE = str(folder / "swift.conf")
    utils.validate_hash_conf()

    import swift.common.storage_policy as policies
    from swift.common.ring import RingData

    policies.reload_storage_policies()

    from swift.account.server import AccountController
    from swift.common.wsgi import loadapp
    from swift.container.server import ContainerController
    from swift.obj.server import ObjectController

    sockets = {n: eventlet.listen(("127.0.0.1", 0)) for n in ("account", "container", "object", "proxy")}
    for name in ("account", "container", "object"):
        port = sockets[name].getsockname()[1]
        device = {"id": 0, "zone": 0, "region": 1, "device": "sda1", "ip": "127.0.0.1", "port": port, "weight": 1.0,
                  "replication_ip": "127.0.0.1", "replication_port": port, "meta": ""}  # fmt: skip
        RingData([array("H", [0])], [device], 32).save(str(folder / f"{name}.ring.gz"))
    conf = {
        "devices": str(folder / "disks"), "swift_dir": str(folder), "mount_check": "false", "fallocate_reserve": "0",
        "recon_cache_path": str(folder), "disable_fallocate": "true", "log_address": str(folder / "no-log"),
    }  # fmt: skip
    (folder / "proxy.conf").write_text(PROXY.format(folder=folder))
    apps = {
        "account": AccountController(conf), "container": ContainerController(conf), "object": ObjectController(conf),
        "proxy": loadapp(str(folder / "proxy.conf"), global_conf={"log_name": "swift"}),
    }  # fmt: skip
    proxy, cache = apps["proxy"], Cache()
    apps["proxy"] = lambda env, start: proxy({**env, "swift.cache": cache}, start)
    quiet = open(os.devnull, "w")
    threads = [eventlet.spawn(eventlet.wsgi.server, sockets[n], apps[n], quiet, max_size=200) for n in apps]
    print(sockets["proxy"].getsockname()[1], flush=True)
    for thread in threads:
        thread.wait()


main()
