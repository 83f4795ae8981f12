# What KubeRay starts:  docker build -t sgla:ray -f docs/examples/ray.Dockerfile .
ARG IMAGE=sgla:cuda
FROM ${IMAGE}
USER root
# KubeRay's probes call wget, and its shells know only the usual folders.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir "ray[default,serve]==2.60.0" \
    && ln -s /opt/sgla/bin/ray /opt/sgla/bin/serve /opt/sgla/bin/sgla /usr/local/bin/
USER 10001
HEALTHCHECK NONE
ENTRYPOINT []
