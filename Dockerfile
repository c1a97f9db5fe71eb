# The program in an image, for docs/kubernetes.yaml and for machines with only a container engine:
#
#     docker build -t batch-trajectories .
#     docker run --rm -v "$PWD:/data" batch-trajectories --config=demo --run_name=demo
#
# EXTRAS: optional parts, such as --build-arg 'EXTRAS=[web,mcp]'. BASE: Python 3.11 or newer, Debian.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG EXTRAS=""
RUN command -v bwrap >/dev/null || { apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*; }
COPY pyproject.toml README.md LICENSE batch_runner.py run_agent.py /src/
COPY agent /src/agent
COPY batch_trajectories /src/batch_trajectories
COPY configs /src/configs
COPY toolsets /src/toolsets
RUN pip install --no-cache-dir "/src${EXTRAS}" && rm -rf /src
WORKDIR /data
ENTRYPOINT ["batch-runner"]
