# The work is in scripts/, which needs no make; these are names for it.
.PHONY: build install try test release fixtures image site clean

# Without a goal, as other programs are built.
build:
	cargo build --release --locked --bins

# scripts/install has the variables: make install PREFIX=/usr DESTDIR=/tmp/tree
export PREFIX DESTDIR BINARIES HELPERS ZSH
install:
	scripts/install

try:
	scripts/try

test:
	scripts/test

# The packages, in target/dist.
release:
	scripts/release

# The tiny OCI layouts, to look at or to test with.
fixtures:
	python3 fixtures/oci/generate.py target/fixtures/oci

# The real image of more than 1 GB, as root.
image:
	tests/images/make-real-image

# The documents as a site: target/site/html/index.html. It needs mdBook. Links lead out of docs/, too.
site:
	rm -rf target/site && mkdir -p target/site/src
	git archive HEAD '*.md' 'LICENSE-*' docs spec contrib tests/containerd | tar -x -C target/site/src
	mv target/site/src/docs/book.toml target/site
	sed 's|](|](docs/|; s|docs/\.\./||' docs/SUMMARY.md > target/site/src/SUMMARY.md
	mdbook build target/site

clean:
	cargo clean
