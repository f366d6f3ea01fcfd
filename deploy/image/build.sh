#!/usr/bin/env bash
# Build the container image from Debian's packages and Python wheels, without an image registry:
#   deploy/image/build.sh p2pcast.tar
# Needs root, and on Debian: apt-get install buildah mmdebstrap python3-pip. The answer is an OCI archive, for
# `podman load`, `skopeo copy oci-archive:` and `ctr image import`.
set -euo pipefail

usage="usage: build.sh ARCHIVE.tar    (EXTRAS=mirror,postgres,kubernetes: optional parts of p2pcast; PYTHON: of pip)"
archive=$(realpath -m "${1:?$usage}")
source=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
extras=${EXTRAS:-mirror,postgres,kubernetes}
python=${PYTHON:-python3}
suite=bookworm suite_python=3.11 suite_glibc_minor=36
user=10001

if ((EUID)); then
    echo "build.sh: only root can make a root file system; run it with sudo" >&2
    exit 1
fi
for tool in buildah mmdebstrap; do
    command -v "$tool" >/dev/null || { echo "build.sh: $tool is missing: apt-get install $tool" >&2; exit 1; }
done
"$python" -m pip --version >/dev/null || { echo "build.sh: $python has no pip: name another with PYTHON=" >&2; exit 1; }

# Equal inputs give equal layers: all times are the commit's, and byte code names no time.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$source" log -1 --format=%ct 2>/dev/null || echo 0)}
work=$(mktemp -d)
buildah=(buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs)
trap '"${buildah[@]}" rm --all >/dev/null 2>&1 || true; rm -rf "$work"' EXIT

# A wheel of what git would commit, so that files that lie about in the checkout stay outside.
mkdir "$work/source" "$work/wheels"
tar -C "$source" --exclude=__pycache__ -c pyproject.toml README.md LICENSE p2pcast topology trainer_node rollout_node netem |
    tar -C "$work/source" -x
platforms=(--platform "manylinux2014_$(uname -m)")
for ((minor = 5; minor <= suite_glibc_minor; minor++)); do platforms+=(--platform "manylinux_2_${minor}_$(uname -m)"); done
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheels" "$work/source"
"$python" -m pip download --quiet --dest "$work/wheels" --only-binary :all: --implementation cp \
    --python-version "$suite_python" "${platforms[@]}" pip "$(echo "$work"/wheels/p2pcast-*.whl)[$extras]"

mmdebstrap --quiet --variant=minbase --include=python3,ca-certificates \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    "$suite" "$work/root.tar"

container=$("${buildah[@]}" from scratch)
"${buildah[@]}" add --quiet "$container" "$work/root.tar" /
"${buildah[@]}" run --isolation chroot --volume "$work/wheels:/mnt:ro" \
    --env SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" "$container" -- sh -euc "
    python3 -m venv --without-pip /opt/p2pcast
    python3 \$(echo /mnt/pip-*.whl)/pip --python /opt/p2pcast/bin/python install --quiet --no-compile --no-cache-dir \
        --no-index --find-links /mnt 'p2pcast[$extras]'
    (cd /mnt && sha256sum *.whl) >/opt/p2pcast/wheels.sha256
    python3 -m compileall -q -j0 --invalidation-mode unchecked-hash /opt/p2pcast/lib || true
    useradd --uid $user --create-home --shell /usr/sbin/nologin p2pcast
    install -d -o $user -g $user -m 0700 /state
    rm -rf /var/log/* /var/cache/* /var/lib/apt/lists/* /tmp/* /root/.cache /etc/*-
    find / -xdev -name __pycache__ -path '/usr/*' -prune -exec rm -rf {} +"
"${buildah[@]}" config --user "$user:$user" --workingdir /state --volume /state --stop-signal SIGTERM \
    --env PATH=/opt/p2pcast/bin:/usr/local/bin:/usr/bin:/bin --env PYTHONUNBUFFERED=1 --env HOME=/home/p2pcast \
    --entrypoint '["p2pcast"]' --cmd --help \
    --label org.opencontainers.image.licenses=Apache-2.0 --label org.opencontainers.image.title=p2pcast "$container"
"${buildah[@]}" commit --quiet --timestamp "$SOURCE_DATE_EPOCH" "$container" p2pcast >/dev/null
rm -f "$archive"
"${buildah[@]}" push --quiet p2pcast "oci-archive:$archive:p2pcast:latest"
echo "$archive: $(($(stat -c %s "$archive") >> 20)) MiB"
