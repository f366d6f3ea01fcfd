# p2pcast for hubs and peers on CPUs, without vLLM: engines run in other images and reach the peer through its install socket.
#   docker build -t p2pcast .
#   docker run --network host --shm-size 40g -v /srv/p2pcast:/state -v /srv/checkpoints:/checkpoints:ro p2pcast seed /checkpoints --state /state …
FROM python:3.11-slim-bookworm

# Kernels are compiled when the image is built, and not at each start. The user must be able to read their folder.
ENV NUMBA_CACHE_DIR=/opt/p2pcast/kernels \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/p2pcast/src
COPY pyproject.toml README.md LICENSE ./
COPY p2pcast p2pcast
COPY topology topology
COPY trainer_node trainer_node
COPY rollout_node rollout_node
COPY netem netem
RUN pip install '.[mirror]' \
    && useradd --uid 10001 --create-home p2pcast \
    && mkdir -p /state /opt/p2pcast/kernels \
    && chown p2pcast /state /opt/p2pcast/kernels

USER p2pcast
WORKDIR /state
RUN python -c 'from p2pcast.codec.kernel_warmup import warm_up; warm_up()'

# Shadows are in /dev/shm (--shm-size: a little more than the model). Keys, versions and the install socket are in /state,
# which must outlive the container.
VOLUME /state
STOPSIGNAL SIGTERM
ENTRYPOINT ["p2pcast"]
CMD ["--help"]
