# make run    executes the TPU notebook on this machine's CPU XLA device; make run DATA=path/to/IRSTD-1k on real images
# make try    the quickstart and the TPU notebook, headless with small settings on the CPU XLA device: what a pull request runs
# make check  lint and the fast tests, in two minutes; JOBS=4 on a machine with more than two cores
# make test   lint, unit tests, launches, notebooks, and whether the outputs in docs/executed still come out
# make nightly  JupyterLab in a browser, the TPU compilers (gigabytes), 1,000 kills, 1,000 flipped bits and 1,000 faults of the
#             disk, of runs and backups; make nightly NIGHTLY="nightly and not long" KILLS=100 FAULTS=50 for half of its time
# make coverage  which of the lines for a TPU the emulated one runs
# make bench  how fast, in ratios, beside other libraries: the loop, MSHNet's step, language models; make bench PARTS=text
# make notebooks  builds dist/: every notebook with the library inside, so that one file is enough, and beside it what
#             `kaggle kernels push` reads
# make twins  runs every built English notebook, without network, in environments like those of Colab and Kaggle: about 18 GB, an hour;
#             make twins ONLY=colab-gpu for one of them
# make wheel  builds wheel and sdist, and trains with the wheel in a clean environment
# make release  what a release gets, in outputs/release/: wheel, sdist, notebooks, checksums; make release ASSETS=folder adds
#             the files of a folder, such as weights of a long training run
# make publish REPO=owner/name  dist/publish/: the repository with its home filled in and the notebooks built, to push
# make executed  docs/executed/: copies of some notebooks with outputs, from small runs on this machine's CPU
# make site   outputs/site/: the pages as a site with search
# make size   how large the library and its pages are, beside their ends
# make plan   asks the TPU compiler again about every task's step (benchmarks/plan.json); half an hour or more

PYTHON ?= python3
BIN := .venv/bin
OUT := outputs
DATA ?=
EPOCHS ?= $(if $(DATA),4,7)
WARM_EPOCH ?= $(if $(DATA),1,2)
SIZE ?= 128
BATCH ?= 4
PARTS ?=
NAMES ?=
ONLY ?=
JOBS ?= 2
NIGHTLY ?= nightly
KILLS ?= 1000
FAULTS ?= 500
ASSETS ?=
# Packages in place of requirements.txt's torch: make fast TORCH="torch==2.8.0 torchvision==0.23.0 torch-xla==2.8.0"
TORCH ?=

# What stands for an NVIDIA driver here: its tool, its module, or its tool below Windows. Nothing: no GPU to use CUDA on
NVIDIA ?= $(wildcard $(addsuffix /nvidia-smi,$(subst :, ,$(PATH))) /proc/driver/nvidia /usr/lib/wsl/lib/nvidia-smi)
# torch and torchvision as CPU wheels, which save 5 GB, where PyTorch has them: Linux on x86-64
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
CPU_TORCH := $(if $(NVIDIA)$(TORCH),,$(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),\
	$(shell sed -n -E 's/^(torch|torchvision)(==[0-9.]+)$$/\1\2+cpu/p' requirements.txt)))

# Less optimisation by LLVM: the first step compiles in a third of the time. For tests and this demonstration only.
XLA_CPU := PJRT_DEVICE=CPU XLA_FLAGS="--xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0"

.PHONY: run try lint check fast test nightly nightly-tests campaign coverage bench plan notebooks twins wheel
.PHONY: release site size executed publish clean

.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "tpukit needs Python 3.11 to 3.13; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -c 'import ensurepip, venv' \
		|| { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(if $(TORCH),grep -v ^torch,cat) requirements.txt > .venv/requirements.txt
	@echo "installing torch and the rest into .venv, once: up to 9 GB, which takes minutes without a word"
	$(if $(CPU_TORCH),$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --index-url $(CPU_INDEX) \
		--retries 0 --timeout 10 $(CPU_TORCH) 2>.venv/cpu.log \
		|| echo "no CPU wheels from $(CPU_INDEX) (.venv/cpu.log says why): torch with CUDA instead")
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) -r .venv/requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

run: .venv/installed
	mkdir -p $(OUT)
	$(XLA_CPU) $(BIN)/papermill notebooks/colab_tpu_setup.ipynb $(OUT)/colab_tpu_setup.ipynb --log-output --no-progress-bar \
		-p ACCELERATOR any -p DATASET_DIR "$(DATA)" -p OUTPUTS $(OUT) -p RUN_NAME mshnet-$(if $(DATA),real,synthetic) \
		-p EPOCHS $(EPOCHS) -p WARM_EPOCH $(WARM_EPOCH) -p IMAGE_SIZE $(SIZE) -p BATCH_SIZE $(BATCH)
	$(BIN)/jupyter nbconvert --to html --log-level WARN $(OUT)/colab_tpu_setup.ipynb
	@echo "executed notebook, HTML copy and run directory: $(OUT)/"

try: .venv/installed
	rm -rf $(OUT)/try && mkdir -p $(OUT)/try
	$(XLA_CPU) $(BIN)/papermill notebooks/mnist_quickstart.ipynb $(OUT)/try/mnist_quickstart.ipynb --no-progress-bar \
		-p ACCELERATOR any -p OUTPUTS $(OUT)/try
	$(MAKE) run OUT=$(OUT)/try EPOCHS=2 WARM_EPOCH=1 SIZE=64

# One thread a worker: most of the time goes to compiling and to starting processes, which take one core.
PYTEST := $(XLA_CPU) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

lint: .venv/installed
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/pyright --pythonpath $(BIN)/python --warnings

check: lint fast

# Without lint, because types of torch differ from release to release.
fast: .venv/installed
	$(PYTEST) --dist worksteal -m "not slow and not nightly"

# The emulated TPU is got first, once; where it cannot be, its tests skip.
test: lint
	-$(BIN)/tpukit emulate v5e-1 true
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m "not nightly"

# Side by side, because the campaign takes one core.
nightly: .venv/installed
	$(MAKE) -j 2 nightly-tests campaign

# Two workers at most: eight emulated chips, or the compiler of a TPU, take gigabytes of memory.
nightly-tests: .venv/installed
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "$(NIGHTLY)"

campaign: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.campaign --kills $(KILLS) --flips $(KILLS) \
		--read-faults $(FAULTS) --write-faults $(FAULTS)

# Which of the lines for a TPU the emulated one runs
COVERAGE := $(XLA_CPU) OMP_NUM_THREADS=1 $(BIN)/python -m coverage
coverage: .venv/installed
	rm -rf $(OUT)/coverage && mkdir -p $(OUT)/coverage
	$(COVERAGE) run -m pytest tests/tools/emulate
	$(COVERAGE) combine --quiet
	$(COVERAGE) report --show-missing

.venv/bench-installed: .venv/installed benchmarks/requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	touch $@

bench: .venv/bench-installed
	$(BIN)/python -m benchmarks $(PARTS)

plan: .venv/installed
	$(BIN)/python -m benchmarks.plans

notebooks: .venv/installed
	$(BIN)/python -m release.notebooks

twins: .venv/installed
	$(BIN)/python -m release.twins $(ONLY)

# Built from a copy, in which the links of README are absolute, as a package index needs them, and which lists every
# file for the sdist.
SOURCE := $(OUT)/source
HOME_URL := https://github.com/TPUKIT_SOURCE
wheel: .venv/installed
	rm -rf $(OUT)/package $(OUT)/clean $(SOURCE)
	mkdir -p $(SOURCE) && git archive HEAD | tar -x -C $(SOURCE)
	git ls-files | sed 's/^/include /' > $(SOURCE)/MANIFEST.in
	sed -i -E -e 's,(!\[[^]]*\]\()([^):#]+\)),\1$(HOME_URL)/raw/main/\2,g' \
		-e 's,(\]\()([^):#]+[^):]*\)),\1$(HOME_URL)/blob/main/\2,g' $(SOURCE)/README.md
	$(BIN)/python -m build --outdir $(OUT)/package $(SOURCE)
	$(PYTHON) -m venv $(OUT)/clean
	$(OUT)/clean/bin/pip install --quiet $(shell grep ^torch== requirements.txt) "$$(ls $(OUT)/package/*.whl)[standard]"
	cd $(OUT)/clean && TPUKIT_OFFLINE=1 bin/python -P -m tpukit train mnist --epochs 1 --run run
	cd $(OUT)/clean && bin/python -P -m tpukit predict demo demo --out detections
	rm -rf $(OUT)/clean $(SOURCE)

release: wheel notebooks
	rm -rf $(OUT)/release && mkdir -p $(OUT)/release && cp $(OUT)/package/* $(OUT)/release
	cd dist && zip -qr ../$(OUT)/release/notebooks.zip . -x 'publish/*'
	$(if $(ASSETS),cp $(ASSETS)/* $(OUT)/release)
	cd $(OUT)/release && sha256sum * > SHA256SUMS

.venv-site/installed: release/site.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/pip install --quiet --disable-pip-version-check -r release/site.txt
	touch $@

site: .venv-site/installed
	.venv-site/bin/mkdocs build --strict --quiet -f release/mkdocs.yml

size: .venv/installed
	@$(BIN)/python -m release.size

executed: .venv/installed
	$(BIN)/python -m release.executed $(NAMES)

# In the copy: what pages say until they are published goes, the built notebooks are tracked.
publish: .venv/installed
	rm -rf dist/publish && git clone --quiet . dist/publish && rm -rf dist/publish/.git
	cd dist/publish && grep -rlIZ --exclude=Makefile -e TPUKIT_SOURCE -e TPUKIT_OWNER -e 'until published -->' . \
		| xargs -0 sed -i -e '/<!-- until published -->/d' -e 's,TPUKIT_OWNER,$(firstword $(subst /, ,$(REPO))),g' \
		-e 's,TPUKIT_SOURCE,$(or $(REPO),$(error REPO=owner/name)),g'
	cd dist/publish && sed -i '/^dist/d' .gitignore && $(CURDIR)/$(BIN)/python -m release.notebooks

clean:
	rm -rf .venv .venv-site .twins $(OUT) build dist *.egg-info
