# An image with scale-cpt and all that it needs, for NVIDIA GPUs or, with VARIANT=cpu, without:
#
#   docker build --tag scale-cpt .
#   docker build --build-arg VARIANT=cpu --tag scale-cpt:cpu .
#   docker run --rm --gpus all --ipc=host --volume "$PWD:$PWD" --workdir "$PWD" scale-cpt scale-cpt train run.yaml
#
# torch's own packages bring CUDA's libraries; the host needs NVIDIA's driver and container toolkit only.
# Apptainer: slurm/scale-cpt.def.
FROM python:3.12-slim-bookworm
ARG VARIANT=cuda
COPY . /opt/scale-cpt
RUN bash /opt/scale-cpt/slurm/install_in_image.sh "$VARIANT"
CMD ["scale-cpt", "--help"]
