# flashbench with torch and Triton, for a machine with NVIDIA's container toolkit:
#
#   python -m build --wheel && docker build -t flashbench .
#   mkdir -p out && docker run --rm --gpus all --user "$(id -u):$(id -g)" -v "$PWD/out:/out" flashbench run --out /out
#
# torch's wheel brings CUDA's libraries, the toolkit the driver; a compiler is there because Triton builds its
# launchers with it. Counters (profile --counters) also need Nsight Compute and --cap-add SYS_ADMIN.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/flashbench
ENV PATH=/opt/flashbench/bin:$PATH
ARG TORCH=2.13.0
RUN pip install --no-cache-dir "torch==${TORCH}"

COPY dist/*.whl /tmp/dist/
RUN pip install --no-cache-dir /tmp/dist/*.whl && rm -r /tmp/dist

# Any user may run it, so that results belong to who asked for them: caches lie in one home, and torch,
# which looks its user's name up, is told one.
RUN useradd --create-home bench && chmod 1777 /home/bench
ENV HOME=/home/bench USER=bench
USER bench
WORKDIR /home/bench
ENTRYPOINT ["flashbench"]
CMD ["doctor"]
