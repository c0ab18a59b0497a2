// A FUSE file system over the folder BACK that caches files as a client of a network file system does.
//
// A page, of PAGE bytes, is read when a part of it is written, and written back as a whole when the file is synced or
// closed, with what it had then in the place of bytes that another client has written meanwhile. Pages are kept until
// the file is opened anew. Each node of a test mounts one.
#define _GNU_SOURCE
#define FUSE_USE_VERSION 31
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct page {
    off_t at;
    int dirty;
    char *data;
    struct page *next;
};

struct node {  // a file, by its inode, while this client knows it
    ino_t inode;
    off_t size;
    struct page *pages;
    struct node *next;
};

static const char *back;
static off_t page_bytes;
static struct node *nodes;

#define BACK(name, path)                                                                                               \
    char name[4096];                                                                                                   \
    snprintf(name, sizeof name, "%s%s", back, path)
#define DONE(call) return (call) == -1 ? -errno : 0

static struct node *node_of(int file) {
    struct stat about;
    fstat(file, &about);
    struct node *node = nodes;
    while (node && node->inode != about.st_ino) node = node->next;
    if (!node) {
        node = calloc(1, sizeof *node);
        *node = (struct node){about.st_ino, 0, NULL, nodes};
        nodes = node;
    }
    if (about.st_size > node->size) node->size = about.st_size;
    return node;
}

static struct page *page_at(struct node *node, off_t at) {
    struct page *page = node->pages;
    while (page && page->at != at) page = page->next;
    return page;
}

static void drop(struct node *node, int dirty_too) {
    for (struct page **link = &node->pages; *link;) {
        struct page *page = *link;
        if (page->dirty && !dirty_too) {
            link = &page->next;
        } else {
            *link = page->next;
            free(page->data);
            free(page);
        }
    }
}

static int write_back(int file) {
    struct node *node = node_of(file);
    for (struct page *page = node->pages; page; page = page->next) {
        off_t rest = node->size - page->at;
        if (page->dirty && pwrite(file, page->data, rest < page_bytes ? rest : page_bytes, page->at) == -1)
            return -errno;
        page->dirty = 0;
    }
    return 0;
}

static int fs_write(const char *path, const char *data, size_t count, off_t at, struct fuse_file_info *info) {
    struct node *node = node_of(info->fh);
    for (size_t done = 0; done < count;) {
        off_t inner = (at + done) % page_bytes, start = at + done - inner;
        size_t length = page_bytes - inner < count - done ? page_bytes - inner : count - done;
        struct page *page = page_at(node, start);
        if (!page) {
            page = malloc(sizeof *page);
            *page = (struct page){start, 0, calloc(1, page_bytes), node->pages};
            node->pages = page;
            if (pread(info->fh, page->data, page_bytes, start) == -1) return -errno;
        }
        memcpy(page->data + inner, data + done, length);
        page->dirty = 1;
        done += length;
    }
    if (at + (off_t)count > node->size) node->size = at + count;
    return count;
}

static int fs_read(const char *path, char *data, size_t count, off_t at, struct fuse_file_info *info) {
    struct node *node = node_of(info->fh);
    if (at >= node->size) return 0;
    if (at + (off_t)count > node->size) count = node->size - at;
    memset(data, 0, count);
    if (pread(info->fh, data, count, at) == -1) return -errno;
    for (struct page *page = node->pages; page; page = page->next) {
        off_t low = page->at > at ? page->at : at, high = page->at + page_bytes;
        if (high > at + (off_t)count) high = at + count;
        if (low < high) memcpy(data + low - at, page->data + low - page->at, high - low);
    }
    return count;
}

static int opened(const char *path, int flags, mode_t mode, struct fuse_file_info *info) {
    BACK(name, path);
    if ((flags & O_ACCMODE) == O_WRONLY) flags = (flags & ~O_ACCMODE) | O_RDWR;  // pages are read, too
    int file = open(name, flags & ~O_APPEND, mode);
    if (file == -1) return -errno;
    drop(node_of(file), 0);
    info->fh = file;
    info->direct_io = 1;
    return 0;
}

static int fs_open(const char *path, struct fuse_file_info *info) { return opened(path, info->flags, 0, info); }

static int fs_create(const char *path, mode_t mode, struct fuse_file_info *info) {
    return opened(path, info->flags | O_CREAT, mode, info);
}

static int fs_flush(const char *path, struct fuse_file_info *info) { return write_back(info->fh); }

static int fs_fsync(const char *path, int data, struct fuse_file_info *info) { return write_back(info->fh); }

static int fs_release(const char *path, struct fuse_file_info *info) {
    write_back(info->fh);
    close(info->fh);
    return 0;
}

static int fs_getattr(const char *path, struct stat *about, struct fuse_file_info *info) {
    BACK(name, path);
    if (lstat(name, about) == -1) return -errno;
    for (struct node *node = nodes; node; node = node->next)
        if (node->inode == about->st_ino && node->size > about->st_size) about->st_size = node->size;
    return 0;
}

static int fs_truncate(const char *path, off_t size, struct fuse_file_info *info) {
    BACK(name, path);
    int file = open(name, O_RDWR), code = 0;
    if (file == -1) return -errno;
    struct node *node = node_of(file);
    code = write_back(file);
    drop(node, 1);
    if (!code && ftruncate(file, node->size = size) == -1) code = -errno;
    close(file);
    return code;
}

static int fs_readdir(const char *path, void *list, fuse_fill_dir_t fill, off_t at, struct fuse_file_info *info,
                      enum fuse_readdir_flags flags) {
    BACK(name, path);
    DIR *folder = opendir(name);
    if (!folder) return -errno;
    for (struct dirent *entry; (entry = readdir(folder));) fill(list, entry->d_name, NULL, 0, 0);
    closedir(folder);
    return 0;
}

static int fs_rename(const char *from, const char *to, unsigned flags) {
    BACK(first, from);
    BACK(second, to);
    if (flags) return -EINVAL;
    DONE(rename(first, second));
}

static int fs_unlink(const char *path) {
    BACK(name, path);
    struct stat about;
    if (lstat(name, &about) == 0)  // its number may be another file's soon
        for (struct node *node = nodes; node; node = node->next)
            if (node->inode == about.st_ino) drop(node, 1), node->inode = 0;
    DONE(unlink(name));
}

static int fs_mkdir(const char *path, mode_t mode) {
    BACK(name, path);
    DONE(mkdir(name, mode));
}

static int fs_rmdir(const char *path) {
    BACK(name, path);
    DONE(rmdir(name));
}

static int fs_fsyncdir(const char *path, int data, struct fuse_file_info *info) { return 0; }

static void *fs_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    config->entry_timeout = config->attr_timeout = config->negative_timeout = 0;
    return NULL;
}

int main(int count, char **words) {
    back = getenv("BACK");
    page_bytes = atol(getenv("PAGE"));
    static const struct fuse_operations calls = {
        .init = fs_init, .getattr = fs_getattr, .readdir = fs_readdir, .open = fs_open, .create = fs_create,
        .read = fs_read, .write = fs_write, .flush = fs_flush, .fsync = fs_fsync, .release = fs_release,
        .truncate = fs_truncate, .rename = fs_rename, .unlink = fs_unlink, .mkdir = fs_mkdir, .rmdir = fs_rmdir,
        .fsyncdir = fs_fsyncdir,
    };
    return fuse_main(count, words, &calls, NULL);
}
